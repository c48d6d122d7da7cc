from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peer.cli import EXIT_IMPOSSIBLE, app
from peer.machine.measured_layers import write_layers
from peer.planning.question import FIXED
from swarmnet.spec import load_spec, parse_spec
from swarmnet.training.memory.plan import MODES
from swarmnet.training.resolving import resolve

SPEC = Path(__file__).parents[3] / "swarmnet" / "runtime" / "default.toml"


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    """The usual run, with updates in fp32."""
    return with_sync(tmp_path, 'mode = "zero"\ncodec = "none"')


def with_sync(folder: Path, lines: str) -> Path:
    path, text = folder / "run.toml", SPEC.read_text()
    assert 'mode = "zero"' in text
    path.write_text(text.replace('mode = "zero"', lines))
    return path


def test_the_table_has_a_row_a_stage_and_the_formula(fp32: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--spec", str(fp32), "--explain", "--replicas", "4"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    header = next(line.split() for line in lines if "params" in line)
    assert header == [
        "stage",
        "params",
        "weights",
        "grads",
        "optim.",
        "sync",
        "activ.",
        "total",
        "no",
        "ZeRO",
    ]
    tables = [lines.index(line) for line in lines if line.split()[:1] == ["stage"]]
    assert lines[tables[1]].split() == ["stage", "keep", "blocks", "recompute", "offload"]
    for start in tables:
        assert sum(line.split()[:1] in (["0"], ["1"]) for line in lines[start : start + 5]) == 2
    assert (
        "x min(R, N) / N = 12.00, with R = 2 owners of a shard and N = 4 replicas" in result.stdout
    )
    modes = next(i for i, line in enumerate(lines) if line.split()[:1] == ["mode"])
    assert [line.split()[0] for line in lines[modes + 2 : modes + 6]] == list(MODES)
    assert all(len(line) <= 80 for line in lines[: modes + 6])


def test_for_programs(fp32: Path) -> None:
    command = [
        *("plan", "--spec", str(fp32), "--explain", "--replicas", "8"),
        *("--precision", "mixed", "--json"),
    ]
    result = CliRunner().invoke(app, command)
    plan = json.loads(result.stdout)
    assert plan["replicas"] == 8
    for stage in plan["stages"]:
        n = stage["num_parameters"]
        assert stage["unsharded"] == 16 * n
        assert stage["state"] == 2 * n + 2 * n + 12 * n * 2 / 8


def test_ranks_that_share_sequences_keep_a_part_of_the_activations(fp32: Path) -> None:
    command = ["plan", "--spec", str(fp32), "--explain"]
    one = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    two = json.loads(CliRunner().invoke(app, [*command, "--cp", "2", "--json"]).stdout)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for alone, shared in zip(one["stages"], two["stages"], strict=True):
        assert shared["state"] == alone["state"]
        assert 0.45 < shared["activations"] / alone["activations"] < 0.75
    assert "Memory of rank 0 of 2" in CliRunner().invoke(app, [*command, "--cp", "2"]).stdout
    fp32.write_text(re.sub(r"(max_position_embeddings) = \d+", r"\1 = 20", fp32.read_text()))
    refused = CliRunner().invoke(app, [*command, "--cp", "64"])
    assert refused.exit_code == 2
    assert "too short" in refused.stderr


def test_ranks_that_divide_experts_have_a_part_of_them(fp32: Path) -> None:
    fp32.write_text(fp32.read_text().replace("[model]", "[model]\nnum_experts = 4", 1))
    command = ["plan", "--spec", str(fp32), "--explain"]
    one = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    two = json.loads(CliRunner().invoke(app, [*command, "--ep", "2", "--json"]).stdout)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    model = load_spec(fp32).model
    held = model.num_parameters - model.num_hidden_layers * 2 * 3 * (
        model.hidden_size * model.expert_size
    )
    assert sum(stage["weights"] for stage in two["stages"]) == pytest.approx(4 * held)
    for alone, shared in zip(one["stages"], two["stages"], strict=True):
        assert shared["optimizer"] == alone["optimizer"]
        assert shared["weights"] == shared["gradients"] < 0.8 * alone["weights"]
        assert 0.45 < shared["activations"] / alone["activations"] < 0.75
    assert "Memory of rank 0 of 2" in CliRunner().invoke(app, [*command, "--ep", "2"]).stdout
    rows = json.loads(
        CliRunner().invoke(app, [*command, "--ep", "2", "--tp", "2", "--json"]).stdout
    )
    assert rows["ranks"] == 4
    for row, of_rank in zip(two["stages"], rows["stages"], strict=True):
        assert of_rank["weights"] == row["weights"] / 2
        assert of_rank["optimizer"] == row["optimizer"]
        assert 0.5 < of_rank["activations"] / row["activations"] < 0.9
    refused = CliRunner().invoke(app, [*command, "--ep", "2", "--tp", "3"])
    assert refused.exit_code == 2
    assert "possible: 1, 2, 4" in refused.stderr
    refused = CliRunner().invoke(app, [*command, "--ep", "5"])
    assert refused.exit_code == 2
    assert "take --ep 4, or less" in refused.stderr


@pytest.mark.parametrize(
    ("mode", "state", "sent"),
    [
        ("zero", 4 + 4 + 8 * 2 / 5, 4 * 2 * 4 / 5),
        ("delayed", 4 + 4 + 12 * 2 / 5 + 8 + 4, 4 * 2 * 4 / 5),
        ("auto", 4 + 4 + 12 * 2 / 5 + 8 + 4, 4 * 2 * 4 / 5),
        ("local", 4 + 4 + 8 + 4 + 4 * 2 / 5, 4 * 2 * 4 / 5 / 10),
        ("gossip", 4 + 4 + 8 + 4 + 4, 16 * 4 / 5 / 10),
    ],
)
def test_what_the_sync_modes_hold_and_send(
    tmp_path: Path, mode: str, state: float, sent: float
) -> None:
    spec = with_sync(tmp_path, f'mode = "{mode}"\nlocal_steps = 10\ncodec = "none"')
    command = ["plan", "--spec", str(spec), "--explain", "--replicas", "5"]
    plan = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert plan["mode"] == mode
    for stage in plan["stages"]:
        n = stage["num_parameters"]
        assert stage["state"] == pytest.approx(state * n)
        assert stage["sent"] == pytest.approx(sent * n)
        if mode != "auto":
            assert stage["by_mode"][mode]["state"] == stage["state"]
            assert stage["by_mode"][mode]["sent_per_round"] == stage["sent"]
    assert f"= {state:.2f}, with R = 2" in CliRunner().invoke(app, command).stdout


def test_few_numbers_are_those_of_local_alone(tmp_path: Path) -> None:
    """In modes of every round `topk` would be `int4`, and the sentence says both."""
    lines = 'mode = "local"\nlocal_steps = 10\ncodec = "topk"\ntopk_density = 0.05'
    spec = with_sync(tmp_path, lines)
    command = ["plan", "--spec", str(spec), "--explain", "--replicas", "4"]
    result = CliRunner().invoke(app, [*command, "--json"])
    each = 4 + 4 + 8 + 4 + 4 * 2 / 4 + 2 + 4 / 4  # what results leave out, the primary has
    for stage in json.loads(result.stdout)["stages"]:
        assert stage["state"] == pytest.approx(each * stage["num_parameters"])
    said = " ".join(CliRunner().invoke(app, command).stdout.split())
    assert "round, with g = 0.562 (gradients)" in said
    assert "every H = 10 rounds, with g = 0.0898 (gradients), r = 0.0898 (results)" in said


@pytest.mark.parametrize("mode", ["zero", "gossip"])
def test_a_file_that_names_no_codec_is_planned_with_the_one_it_would_be_started_with(
    mode: str, tmp_path: Path
) -> None:
    plans = []
    for codec in ("", f'\ncodec = "{resolve_codec(mode)}"'):
        spec = with_sync(tmp_path, f'mode = "{mode}"{codec}')
        command = ["plan", "--spec", str(spec), "--explain", "--json"]
        plans.append(json.loads(CliRunner().invoke(app, command).stdout))
    assert plans[0] == plans[1]
    assert plans[0]["stages"][0]["sent"] < 2.5 * plans[0]["stages"][0]["num_parameters"]


def resolve_codec(mode: str) -> str:
    spec = parse_spec(SPEC.read_text().replace('mode = "zero"', f'mode = "{mode}"'))
    return resolve(spec).sync.codec


def test_low_precision_and_the_policies(fp32: Path) -> None:
    command = [
        *("plan", "--spec", str(fp32), "--explain", "--replicas", "4"),
        *("--precision", "bf16", "--json"),
    ]
    plan = json.loads(CliRunner().invoke(app, command).stdout)
    assert plan["precision"] == "bf16"
    for stage in plan["stages"]:
        n = stage["num_parameters"]
        assert stage["state"] == (2 + 4 + 4 + 8 * 2 / 4) * n
        assert stage["by_policy"]["keep"] == stage["activations"]
        assert stage["by_policy"]["blocks"] < stage["by_policy"]["keep"]


def measure(path: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--spec", str(path), "--measure", *more])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_measured_layers_are_cut_and_may_be_written_into_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = SPEC.read_text()
    path.write_text(text)
    entry = measure(path, "--device", "cpu").splitlines()[-1]
    layers = json.loads(entry.removeprefix("layers = "))
    assert len(layers) == 2
    assert sum(layers) == 7
    assert path.read_text() == text
    found = json.loads(measure(path, "--write", "--json"))
    assert all(seconds > 0 for seconds in found["layer_s"])
    assert found["slowest_stage_s"] <= found["present_slowest_stage_s"]
    assert load_spec(path).pipeline.layers == tuple(found["layers"])
    assert re.sub(r"(?m)^layers = .*\n", "", path.read_text()) == text, "the rest is as it was"


def test_a_cut_is_replaced_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SPEC.read_text().replace("num_stages = 2", "num_stages = 2\nlayers = [6, 1]"))
    assert "cut by its [pipeline] layers: [6, 1]" in measure(path)
    before = path.read_text()
    write_layers(path, [3, 4])
    assert path.read_text() == before.replace("[6, 1]", "[3, 4]")
    assert load_spec(path).pipeline.layers == (3, 4)


def test_a_cut_that_does_not_fit_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for layers, words in (("[6, 2]", "add up to 8"), ("[7]", "num_stages is 2"), ("[7, 0]", "")):
        path.write_text(
            SPEC.read_text().replace("num_stages = 2", f"num_stages = 2\nlayers = {layers}")
        )
        result = CliRunner().invoke(app, ["plan", "--spec", str(path)])
        assert result.exit_code == 2
        assert words in str(result.output) + str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--spec", str(SPEC), "--explain", "--write"], 2),
        (["--spec", str(SPEC), "--explain", "--measure"], 2),
        (["--spec", str(SPEC), "--precision", "mixed"], 2),
        (["--spec", str(SPEC), "--machines", "24GB"], 2),
        (["--spec", str(SPEC), "--machines", "24GB-gpu", "--links", "20"], 2),
        (["--spec", str(SPEC), "--machines", "24GB-gpu*2", "--tokens", "many"], 2),
        (["--spec", "nowhere.toml"], 2),
        (["--spec", "x", "--replicas", "0"], 2),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], code: int) -> None:
    assert CliRunner().invoke(app, ["plan", *arguments]).exit_code == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--spec {run} --measure --machines rtx4090", "leave --machines, --choose"),
        ("--spec {run} --explain --schedules", "leave --schedules and --picture out"),
        ("--spec {run} --explain --machines rtx4090 --tp 2", "a plan chooses ranks"),
        ("--spec {folder} --measure", "swarmnet plan --spec {folder} --write"),
        ("--spec {folder}/config.json", "give its folder: --spec {folder}"),
        ("--spec {run} --machines rtx9", "12GB-gpu@10TFLOPS"),
        ("--spec {run} --machines nowhere.toml", 'each with card = "rtx4090", or memory_gb = 24'),
    ],
)
def test_a_refusal_says_what_to_write_instead(folder_8b: Path, arguments: str, words: str) -> None:
    names = {"run": SPEC, "folder": folder_8b}
    result = CliRunner().invoke(app, ["plan", *arguments.format(**names).split()])
    assert result.exit_code == 2
    assert words.format(**names) in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_plan_of_machines_comes_with_its_formulas(fp32: Path) -> None:
    """Of its own cut, replicas and precision."""
    machines = ("--machines", "24GB-gpu*4", "--links", "1Gbit,1ms")
    found = answered(fp32, "--explain", *machines)
    stages = {row["stage"]: row["layers"] for row in found["rows"]}
    assert len(found["memory"]["stages"]) == len(stages) == 2
    assert found["memory"]["precision"] == found["rows"][0]["precision"] == "bf16"
    counts = [sum(r["count"] for r in found["rows"] if r["stage"] == k) for k in stages]
    assert found["memory"]["replicas"] == min(counts)
    told = CliRunner().invoke(app, ["plan", "--spec", str(fp32), "--explain", *machines]).stdout
    assert told.startswith("fits: ")
    assert "Activations by policy" in told


def test_more_microbatches_in_flight_take_more_memory() -> None:
    def activations(in_flight: int) -> list[float]:
        command = [
            *("plan", "--spec", str(SPEC), "--explain"),
            *("--in-flight", str(in_flight), "--json"),
        ]
        stages = json.loads(CliRunner().invoke(app, command).stdout)["stages"]
        return [stage["activations"] for stage in stages]

    one, two, four = activations(1), activations(2), activations(4)
    for a, b, d in list(zip(one, two, four, strict=True))[:-1]:
        assert b > a > 0
        assert d - a == pytest.approx(3 * (b - a))
    assert one[-1] == four[-1], "the last stage goes forward and backward in one"


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder_8b(tmp_path: Path) -> Path:
    """A Hugging Face folder without its weights, which no plan reads."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def answered(spec: Path, *more: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", "--spec", str(spec), *more, "--json"])
    assert result.exit_code in (0, EXIT_IMPOSSIBLE), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["fits"] == (result.exit_code == 0)
    return found


def test_a_house_is_planned_with_a_key_and_told_what_that_is_worth(fp32: Path) -> None:
    machines = ("--machines", "16GB-cpu@0.02TFLOPS*4", "--links", "20Mbit/100Mbit,10ms,house=2")
    text = fp32.read_text().replace("num_stages = 2", "num_stages = 1")
    fp32.write_text(text.replace("global_batch = 32", "global_batch = 256"))
    found = answered(fp32, *machines)
    told = [c for c in found["choices"] if c["value"] == "--household FILE"]
    assert len(told) == 1
    assert "on all machines of a house" in told[0]["why"]
    times, up = re.search(r"\(-(\d+) %\), and up to ([\d.]+) GB of data", told[0]["why"]).groups()  # type: ignore[union-attr]
    assert int(times) > 10
    with_key = sum(r["up_per_day"] * r["count"] for r in found["rows"]) / found["tokens_per_s"]
    without = 4 * float(up) * 1e9 / found["tokens_per_s"] / (1 - int(times) / 100)
    assert with_key / without == pytest.approx(0.5, rel=0.05)

    fp32.write_text(fp32.read_text().replace('mode = "zero"', 'mode = "local"'))
    local = answered(fp32, *machines)
    assert not [c for c in local["choices"] if "--household" in c["value"]]
    fp32.write_text(fp32.read_text().replace('mode = "local"', 'mode = "zero"'))
    one_house = answered(fp32, *machines[:3], "20Mbit/100Mbit,10ms,house=4")
    assert not [c for c in one_house["choices"] if "--household" in c["value"]]
    assert {r["up_per_day"] for r in one_house["rows"]} == {0.0}


def test_links_decide_which_machine_takes_which_stage(fp32: Path, tmp_path: Path) -> None:
    """A middle stage sends both ways. Of two that are as quick, it gets the one with the link."""
    kind = (
        '[[machine]]\nname = "{}"\nhost_memory_gb = 16\ntflops = 2\ncount = {}\n'
        "up_mbit = {}\ndown_mbit = {}\nlatency_ms = 10\n"
    )
    fp32.write_text(fp32.read_text().replace("num_stages = 2", "num_stages = 3"))
    machines = tmp_path / "machines.toml"
    told = []
    for up in (5, 1000):
        text = kind.format("wired", 1, 1000, 1000) + kind.format("home", 2, up, max(up, 100))
        machines.write_text(text)
        found = answered(fp32, "--machines", str(machines))
        told.append([c["why"] for c in found["choices"] if c["value"].startswith("--stage,")])
        if up == 5:
            rows = {row["stage"]: row["machine"] for row in found["rows"]}
            assert rows == {0: "home", 1: "wired", 2: "home"}
    assert len(told[0]) == 1
    assert told[0][0].startswith("links decided which machine takes which stage")
    assert told[1] == []


CARDS = ("--machines", "24GB-gpu*2")


def test_what_is_impossible_is_said_with_what_would_make_it_possible(folder_8b: Path) -> None:
    found = answered(folder_8b, *CARDS)
    assert not found["fits"]
    verdict = found["verdict"]
    assert verdict.startswith("impossible: a model of 8.03 B parameters in full training on 2 x 24")
    assert "of the 24 GB that a 24GB-gpu has on the device, and " in verdict
    assert "of main memory" in verdict
    lora, more = found["changes"]
    assert lora.startswith("[lora] and num_stages = ")
    assert re.fullmatch(r"\d+ more 24GB-gpu \(\d+ machines in all\)", more)
    number = int(more.split("(")[1].split()[0])
    assert answered(folder_8b, "--machines", f"24GB-gpu*{number}")["fits"]
    assert not answered(folder_8b, "--machines", f"24GB-gpu*{number - 1}")["fits"]


def test_a_number_of_stages_that_the_file_fixes_is_not_mended_with_more_machines(
    folder_8b: Path,
) -> None:
    """No seventh of the model fits, however many machines there are; another number of stages does,
    with those that are there or with as many more as it says."""
    spec = folder_8b.parent / "run.toml"
    spec.write_text(
        f'[model]\nfrom = "{folder_8b}"\n[data]\npaths = "x"\n'
        "[optimizer]\nlearning_rate = 1e-3\nrounds = 1\n"
        "[pipeline]\nnum_stages = 7\nglobal_batch = 64\nmicrobatch = 1\n"
        '[sync]\nmode = "delayed"\n'
    )
    found = answered(spec, "--machines", "24GB-gpu*14")
    assert not found["fits"]
    assert [x for x in found["changes"] if x.startswith("num_stages = ")]
    assert not [x for x in found["changes"] if " more " in x]
    few = answered(spec, "--machines", "24GB-gpu*7")["changes"]
    (more,) = (x for x in few if " more " in x)
    said = re.fullmatch(
        r"num_stages = (\d+) and (\d+) more 24GB-gpu \((\d+) machines in all\)", more
    )
    assert said, more
    assert int(said[3]) == 7 + int(said[2])
    spec.write_text(spec.read_text().replace("num_stages = 7", f"num_stages = {said[1]}"))
    assert answered(spec, "--machines", f"24GB-gpu*{said[3]}")["fits"]


def test_the_machine_that_is_short_of_memory_is_named(folder_8b: Path) -> None:
    """The largest machine has room for any even stage, and the small ones do not."""
    verdict = answered(folder_8b, "--machines", "16GB-cpu*3, mac-64GB")["verdict"]
    said = re.search(
        r"with 4 stages one needs ([\d.]+) GB of the ([\d.]+) GB that a (\S+) has", verdict
    )
    assert said, verdict
    assert said[3] == "16GB-cpu"
    assert float(said[1]) > float(said[2])


def test_adapters_are_reckoned_with_the_policy_that_a_machine_would_choose(
    folder_8b: Path,
) -> None:
    found = answered(folder_8b, *CARDS, "--lora")
    assert found["fits"]
    assert {row["activations"] for row in found["rows"]} == {"blocks"}
    for row in found["rows"]:
        assert 8e9 * 2 / len(found["rows"]) * 0.9 < row["device_bytes"] < 24e9
        assert row["host_bytes"] < 1e9


def test_the_verdict_names_the_machine_that_is_short_of_memory_first(folder_8b: Path) -> None:
    """What it lacks is what it would need more to keep all; with that much more nobody is short."""
    found = answered(folder_8b, "--machines", "24GB-gpu, 20GB-gpu", "--lora")
    said = re.search(
        r"; first machine short of memory: (\S+), by ([\d.]+) GB on the device, "
        r"unless activations = (\w+)$",
        found["verdict"],
    )
    assert said
    name, lacks, policy = said[1], float(said[2]), said[3]
    assert name == "20GB-gpu"
    assert {row["activations"] for row in found["rows"] if row["machine"] == name} == {policy}
    assert policy != "keep"
    stages = {row["stage"] for row in found["rows"]}
    assert len(stages) == 1, "one stage: more memory changes no cut"
    told = choices(found)["[pipeline] activations"]
    assert told == f"blocks (24GB-gpu of stage 0), {policy} (20GB-gpu of stage 0)"
    for more, is_short in ((lacks + 1, False), (lacks - 1, True)):
        card = f"{20 + more:.0f}GB-gpu*2"
        verdict = answered(folder_8b, "--machines", card, "--lora")["verdict"]
        assert ("short of memory" in verdict) == is_short, verdict


def test_what_goes_over_the_links_is_in_the_answer(folder_8b: Path) -> None:
    """8.4 MB of bf16 each way for 1,024 tokens."""
    text = (
        f'[model]\nfrom = "{folder_8b}"\n[lora]\n[data]\npaths = "x"\n'
        "[optimizer]\nlearning_rate = 1e-3\nrounds = 1\n"
        '[pipeline]\nnum_stages = 2\nglobal_batch = 64\nmicrobatch = 1\ncodec = "bf16"\n'
    )
    spec = folder_8b.parent / "run.toml"
    spec.write_text(text)
    found = answered(spec, *CARDS, "--links", "20Mbit/20Mbit,30ms")
    assert [row["stage"] for row in found["rows"]] == [0, 1]
    for row in found["rows"]:
        assert row["up_per_round"] == pytest.approx(64 * 1024 * 4096 * 2, rel=0.01)
    assert found["round_s"]["links"] > 100, "3.6 minutes, less what is computed meanwhile"
    in_all = found["round_s"]["compute"] + found["round_s"]["links"]
    assert in_all == pytest.approx(64 * 1024 * 4096 * 2 / 2.5e6, rel=0.01)
    assert "of a round is links" in found["verdict"]


def test_the_verdict_comes_first_and_machines_follow() -> None:
    machines = ("--machines", "24GB-gpu*2, 16GB-cpu*3, mac-32GB")
    result = CliRunner().invoke(app, ["plan", "--spec", str(SPEC), *machines])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fits: 2 stages x ")
    assert "tokens/s; up to " in lines[0]
    assert any(line.split()[:3] == ["machine", "stage", "layers"] for line in lines)
    text = result.stdout
    for part in ("compute ", "links ", "exchange ", "latency ", "bubble ", "1 B tokens: "):
        assert part in text
    for part in ("a newcomer downloads ", "one more ", "without one ", "with num_stages = 1: "):
        assert part in text
    found = answered(SPEC, *machines)
    assert found["verdict"] == lines[0]
    assert sum(found["round_s"][k] for k in found["round_s"] if k != "seconds") == pytest.approx(
        found["round_s"]["seconds"]
    )
    assert found["hours"] == pytest.approx(1e9 / found["tokens_per_day"] * 24)
    half = answered(SPEC, *machines, "--tokens", "500M")
    assert half["hours"] == pytest.approx(found["hours"] / 2)


def test_a_batch_that_grows_is_slower_before(tmp_path: Path) -> None:
    path, machines = tmp_path / "run.toml", ("--machines", "24GB-gpu*2", "--tokens", "100M")
    text = SPEC.read_text()
    batch = re.search(r"global_batch = (\d+)", text)
    assert batch is not None
    path.write_text(text)
    whole = answered(path, *machines)
    first = int(batch[1]) // 4
    path.write_text(
        text.replace(batch[0], f"{batch[0]}\nbatch_ramp = [[0, {first}], [9, {batch[1]}]]")
    )
    grown = answered(path, *machines)
    assert grown["tokens_per_s"] == whole["tokens_per_s"]
    assert grown["helps"][0].startswith(f"before round 9: rounds of {first} samples, about ")
    assert grown["hours"] > whole["hours"]
    result = CliRunner().invoke(app, ["plan", "--spec", str(path), *machines, "--choose"])
    assert result.exit_code == 2
    assert "--choose would choose one" in " ".join(result.output.split())


def test_peers_here_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four on two cores are half as fast each as two, and have half of the memory."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    rows = {}
    for count in (2, 4):
        command = ["plan", "--spec", str(SPEC), "--machines", f"here*{count}", "--json"]
        plan = json.loads(CliRunner().invoke(app, command).stdout)
        assert sum(row["count"] for row in plan["rows"]) == count
        assert any(f"with {count} peers at work" in note for note in plan["notes"])
        rows[count] = plan
    room = [rows[count]["rows"][0]["device_room"] for count in (2, 4)]
    assert room[1] == pytest.approx(room[0] / 2, rel=0.2)
    rate = [rows[count]["tokens_per_s"] for count in (2, 4)]
    assert rate[1] < 1.5 * rate[0], "no more cores than before"


def test_without_machines_eight_like_this_one_are_planned() -> None:
    found = answered(SPEC, "--device", "cpu")
    assert sum(row["count"] for row in found["rows"]) <= 8
    assert {row["machine"] for row in found["rows"]} == {"this-machine"}
    assert "this machine's layers were timed" in found["notes"]


def test_hours_count_in_a_day(tmp_path: Path) -> None:
    machines = tmp_path / "machines.toml"
    days = []
    for hours in (24, 12):
        machines.write_text(f'[[machine]]\ncard = "rtx4090"\ncount = 2\nhours = {hours}\n')
        found = answered(SPEC, "--machines", str(machines))
        days.append((found["tokens_per_s"], found["tokens_per_day"]))
    assert days[0][0] == days[1][0]
    assert days[0][1] == pytest.approx(2 * days[1][1])


def test_a_slow_uplink_is_late_in_mode_local_and_stops_nobody(tmp_path: Path) -> None:
    machines = tmp_path / "machines.toml"
    kind = '[[machine]]\nname = "{}"\nmemory_gb = 16\ntflops = 0.02\ncount = {}\nup_mbit = {}\n'
    machines.write_text(kind.format("fast", 5, 20) + kind.format("slow", 1, 2))
    spec = with_sync(tmp_path, 'mode = "local"\nlocal_steps = 30')
    for before, after in (("num_stages = 2", "num_stages = 1"), ("batch = 32", "batch = 256")):
        text = spec.read_text()
        assert text.count(before) == 1
        spec.write_text(text.replace(before, after))
    found = answered(spec, "--machines", str(machines))
    (late,) = (line for line in found["helps"] if line.startswith("late: "))
    share = re.fullmatch(
        "late: 1 x slow: no exchange waits for it; it works ([0-9]+) % of the time", late
    )
    assert share is not None
    assert 80 < int(share[1]) < 100
    rows = {row["machine"]: row for row in found["rows"]}
    per_round = [rows[name]["up_per_round"] for name in ("slow", "fast")]
    assert per_round[0] < per_round[1], "it leads no shard"
    without = next(x for x in found["losses"] if x["machine"] == "slow")
    assert without["tokens_per_s"] < 0.95 * found["tokens_per_s"]


def choices(found: dict[str, Any]) -> dict[str, str]:
    return {c["key"]: c["value"] for c in found["choices"]}


def test_precision_and_policy_are_told_with_their_reason(folder_8b: Path) -> None:
    found = answered(folder_8b, "--lora", "--machines", "rtx4090, t4", "--links", "1Gbit,1ms")
    told = choices(found)
    assert told["[pipeline] precision"] == "bf16 (rtx4090), fp16 (t4)"
    policies = {row["activations"] for row in found["rows"]}
    assert all(name in told["[pipeline] activations"] for name in policies)
    why = {c["key"]: c["why"] for c in found["choices"]}
    assert "suits each device" in why["[pipeline] precision"]
    asked = answered(SPEC, "--machines", "24GB-gpu*2", "--precision", "fp16")
    assert choices(asked)["[pipeline] precision"] == "fp16"
    assert {c["why"] for c in asked["choices"] if "precision" in c["key"]} == {
        "as --precision says"
    }


def test_a_card_without_bf16_is_told_of_fp32_where_weights_must_lie_elsewhere(
    folder_8b: Path,
) -> None:
    command = ("--lora", "--machines", "t4+64GB")
    found = answered(folder_8b, *command)
    assert not found["fits"]
    assert found["changes"][0] == "--precision fp32"
    exact = answered(folder_8b, *command, "--precision", "fp32")
    assert {row["weights"] for row in exact["rows"]} == {"host"}


def test_one_more_is_of_a_kind_that_is_at_work(folder_8b: Path) -> None:
    found = answered(folder_8b, "--lora", "--machines", "24GB-gpu*2, 8GB-cpu*3")
    assert {row["machine"] for row in found["rows"]} == {"24GB-gpu"}
    assert found["one_more_kind"] == "24GB-gpu"
    assert found["one_more"] > 1.2 * found["tokens_per_s"]


def test_no_figure_of_the_table_is_cut_in_a_narrow_terminal(folder_8b: Path) -> None:
    command = ["plan", "--spec", str(folder_8b), "--lora", "--machines", "2x rtxa6000+128GB"]
    shown = CliRunner().invoke(app, [*command, "--links", "1Gbit,1ms"]).stdout
    table = shown[: shown.index("a round:")]
    assert "…" not in table
    assert all(len(line) <= 80 for line in table.splitlines()[1:])


def test_a_gain_beyond_measure_is_told_in_times() -> None:
    more = ("--machines", "24GB-gpu*2", "--links", "0.01Mbit,30ms")
    (line,) = (x for x in answered(SPEC, *more)["helps"] if x.startswith("with num_stages = 1"))
    assert re.search(r"tokens/s \([\d,.]+ k? ?times\)", line), line


def test_fewer_machines_than_stages_have_seats() -> None:
    found = answered(SPEC, "--machines", "24GB-gpu")
    assert found["fits"]
    assert choices(found)["swarmnet peer"] == "--stages 2"
    assert {row["machine"] for row in found["rows"]} == {"seat of 24GB-gpu"}
    assert [row["stage"] for row in found["rows"]] == [0, 1]
    free = answered(SPEC, "--machines", "24GB-gpu", "--choose")
    assert free["tokens_per_s"] > found["tokens_per_s"]
    assert "swarmnet peer" not in choices(free)


@pytest.mark.parametrize("machines", ["2x 24GB-gpu", "24GB-gpu"])
def test_peers_of_one_machine_use_no_link_and_are_lost_together(machines: str) -> None:
    found = answered(SPEC, "--machines", machines)
    assert choices(found)["swarmnet peer"] in ("a peer for each card", "--stages 2")
    assert [row["stage"] for row in found["rows"]] == [0, 1]
    assert {row["up_per_round"] for row in found["rows"]} == {0.0}
    assert "up to 0 B of data up a day" in found["verdict"]
    assert found["round_s"]["links"] == 0
    (lost,) = found["losses"]
    assert (lost["stages"], lost["tokens_per_s"]) == ([0, 1], 0.0)


def test_a_machine_sends_what_all_its_peers_send(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(SPEC.read_text().replace("num_stages = 2", "num_stages = 4"))
    found = answered(spec, "--machines", "24GB-gpu*2", "--links", "20Mbit/20Mbit,30ms")
    assert {row["machine"] for row in found["rows"]} == {"seat of 24GB-gpu"}
    up = [row["up_per_round"] for row in found["rows"]]
    assert found["up_per_round"] == pytest.approx(sum(up) / 2), "as much on both machines"
    assert len(found["losses"]) == 2
    machines = tmp_path / "machines.toml"
    machines.write_text('[[machine]]\ncard = "rtx4090"\nhousehold = "attic"\ncount = 2\n')
    at_home = answered(spec, "--machines", str(machines))
    assert {row["up_per_round"] for row in at_home["rows"]} == {0.0}


def test_uneven_replicas_are_told_with_what_even_ones_would_have(tmp_path: Path) -> None:
    """One machine as quick as the three others together."""
    spec, text = tmp_path / "run.toml", SPEC.read_text()
    text = text.replace("num_stages = 2", "num_stages = 2\nlayers = [4, 3]")
    spec.write_text(text.replace("global_batch = 32", "global_batch = 512"))
    machines = "16GB-cpu@0.02TFLOPS*3, 16GB-cpu@0.06TFLOPS"
    found = answered(spec, "--machines", machines, "--links", "1Gbit/1Gbit,1ms")
    (told,) = (c for c in found["choices"] if c["key"] == "replicas")
    assert told["value"] == "1 of stage 1, 3 of stage 0"
    said = re.search(
        r"; 2 of each would have ([\d,]+) tokens/s \((-\d+) %\), as peers", told["why"]
    )
    assert said, told
    rate = float(said[1].replace(",", ""))
    assert rate == pytest.approx((1 + int(said[2]) / 100) * found["tokens_per_s"], rel=0.02)
    spec.write_text(spec.read_text().replace("[sync]", "[sync]\nreplication = 1"))
    single = answered(spec, "--machines", machines, "--links", "1Gbit/1Gbit,1ms")
    (told,) = (c for c in single["choices"] if c["key"] == "replicas")
    assert "as peers" not in told["why"], "no copy is promised"


def test_the_cut_that_the_run_makes_by_itself_is_told_beside_a_better_one(fp32: Path) -> None:
    machines = ("--machines", "16GB-cpu@0.02TFLOPS, 16GB-cpu@0.4TFLOPS", "--links", "1Gbit,1ms")
    told = {c["key"]: c for c in answered(fp32, *machines)["choices"]}["[pipeline] layers"]
    words = r"without this line the run takes (\[.*\]): ([\d,]+) tokens/s \((-\d+) %\)"
    said = re.search(words, told["why"])
    assert said, told["why"]
    own, rate, less = said.groups()
    assert own != told["value"]
    assert int(less) < -20
    fp32.write_text(fp32.read_text().replace("num_stages = 2", f"num_stages = 2\nlayers = {own}"))
    found = answered(fp32, *machines)
    assert f"{found['tokens_per_s']:,.0f}" == rate
    assert {c["key"]: c["why"] for c in found["choices"]}["[pipeline] layers"] == FIXED


def test_who_is_left_out_is_told_what_it_would_cost() -> None:
    found = answered(SPEC, "--machines", "24GB-gpu*3")
    assert choices(found)["replicas"] == "1 of each stage"
    (line,) = (x for x in found["helps"] if x.startswith("left out: 1 x 24GB-gpu: at stage "))
    said = re.search(
        r"make a round ([\d.]+) s instead of ([\d.]+) s: exchange ([\d.]+) s instead of 0 s$", line
    )
    assert said, line
    assert float(said[2]) == pytest.approx(found["round_s"]["seconds"], rel=0.01)
    assert float(said[1]) > float(said[2])


def test_a_codec_that_the_file_names_is_the_runs(fp32: Path) -> None:
    found = answered(fp32, "--machines", "24GB-gpu*2")
    why = {c["key"]: c["why"] for c in found["choices"]}
    assert choices(found)["[sync] codec"] == "none"
    assert why["[sync] codec"] == "as the run says"
    assert "shown to change no loss" in why["[pipeline] codec"]


def test_too_few_machines_with_too_little_memory() -> None:
    found = answered(SPEC, "--machines", "0.01GB-cpu")
    assert not found["fits"]
    assert found["verdict"].startswith("impossible: 2 stages on 1 machine: as peers of 2 stages")


def test_cards_of_a_machine_are_ranks_or_peers(folder_8b: Path, tmp_path: Path) -> None:
    """Whichever has more tokens/s: by the link between the cards."""
    machines = tmp_path / "machines.toml"
    said = {}
    for link in (400, 0.05):
        machines.write_text(
            f'[[machine]]\ncard = "rtx4090"\ncards = 2\ncard_link_gb_s = {link}\n'
            "up_mbit = 10000\ndown_mbit = 10000\nlatency_ms = 0.1\n"
        )
        said[link] = answered(folder_8b, "--lora", "--machines", str(machines))
    quick, slow = said[400], said[0.05]
    assert choices(quick)["swarmnet peer"] == "one peer a machine"
    assert choices(quick)["swarmnet peer on rtx4090, stage 0"] == "--tp 2"
    assert [(r["ranks"], r["local"]) for r in quick["rows"]] == [(2, "tensor")]
    assert choices(slow)["swarmnet peer"] == "a peer for each card"
    assert {r["machine"] for r in slow["rows"]} == {"card of rtx4090"}
    assert quick["tokens_per_s"] > slow["tokens_per_s"]


def test_weights_lie_on_the_host_where_that_makes_a_plan_possible(folder_8b: Path) -> None:
    machines = "24GB-gpu+256GB"
    found = answered(folder_8b, "--machines", machines)
    assert found["fits"]
    (row,) = found["rows"]
    assert row["weights"] == "host"
    assert row["device_bytes"] < 24e9 < row["host_bytes"]
    (why,) = (c["why"] for c in found["choices"] if c["value"] == "--weights-memory host")
    assert "s copies beside it" in why


def test_a_plan_is_written_into_the_run_and_all_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = SPEC.read_text()
    path.write_text(text)
    found = answered(path, "--machines", "24GB-gpu*4", "--choose", "--write")
    spec = load_spec(path)
    stages = {row["stage"]: row["layers"] for row in found["rows"]}
    assert spec.pipeline.num_stages == len(stages)
    assert spec.pipeline.layers == tuple(end - first for first, end in stages.values())
    assert spec.pipeline.global_batch == found["samples"]
    assert spec.model == load_spec(SPEC).model
    again = answered(path, "--machines", "24GB-gpu*4")
    assert again["tokens_per_s"] == pytest.approx(found["tokens_per_s"])
    changed = {"num_stages", "layers", "global_batch", "microbatch", "mode"}
    kept = [line for line in text.splitlines() if line.split(" ")[0] not in changed]
    assert [x for x in path.read_text().splitlines() if x.split(" ")[0] not in changed] == kept


def test_a_folder_becomes_a_run(
    folder_8b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = answered(folder_8b, *CARDS, "--lora", "--write")
    spec = load_spec(tmp_path / "run.toml")
    assert spec.lora is not None
    assert spec.model.source == str(folder_8b)
    assert spec.pipeline.global_batch == found["samples"]
    command = ["plan", "--spec", str(folder_8b), *CARDS, "--lora", "--write"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "run.toml is there already" in result.output + str(result.exception)
    assert answered(tmp_path / "run.toml", *CARDS)["fits"]
