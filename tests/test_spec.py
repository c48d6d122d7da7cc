"""The run's spec: what it accepts, and what it says when it does not."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from swarmnet.errors import SpecError
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import (
    MAX_SPEC_BYTES,
    TABLES,
    RunSpec,
    describe,
    load_spec,
    parse_spec,
    spec_of_values,
    values_of_spec,
)

LLAMA = """
seed = 7

[model]
kind = "llama"
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 176
vocab_size = 256
max_position_embeddings = 32

[data]
paths = ["python-stdlib"]

[optimizer]
learning_rate = 0.003
warmup_rounds = 5
rounds = 50

[pipeline]
num_stages = 2
global_batch = 32
microbatch = 4
"""

CUSTOM = """
[model]
kind = "custom"
builder = "my_model.py:build"
options = { width = 32, deep = [1, 2] }

[optimizer]
learning_rate = 0.01
rounds = 10

[pipeline]
num_stages = 3
global_batch = 8
microbatch = 2
"""


def change(old: str, new: str, text: str = LLAMA) -> str:
    assert old in text
    return text.replace(old, new, 1)


def failure(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message.removeprefix("run.toml: ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "hidden_size = 64",
            "hidden_sise = 64",
            "[model] hidden_sise is unknown; did you mean hidden_size?",
        ),
        ("[model]", "[modle]", "[modle] is unknown; did you mean [model]?"),
        ("seed = 7", "sed = 7", "sed is unknown; did you mean seed?"),
        ("seed = 7", "rounds = 7", "rounds is unknown outside a table; it belongs to [optimizer]"),
        (
            "microbatch = 4",
            "microbatch = 4\nrounds = 3",
            "[pipeline] rounds is unknown; it belongs to [optimizer]",
        ),
        ("hidden_size = 64", "", '[model] hidden_size is missing; kind "llama" needs it'),
        ("rounds = 50", "", "[optimizer] rounds is missing; add it"),
        (
            "hidden_size = 64",
            'hidden_size = "64"',
            "[model] hidden_size = '64': input should be a valid integer",
        ),
        (
            "rounds = 50",
            "rounds = true",
            "[optimizer] rounds = True: input should be a valid integer",
        ),
        (
            "learning_rate = 0.003",
            "learning_rate = nan",
            "[optimizer] learning_rate = nan: input should be a finite number",
        ),
        (
            "learning_rate = 0.003",
            "learning_rate = -1",
            "[optimizer] learning_rate = -1: input should be greater than 0",
        ),
        (
            "num_attention_heads = 4",
            "num_attention_heads = 3",
            "[model] num_attention_heads (3) must divide hidden_size (64)",
        ),
        (
            "num_key_value_heads = 2",
            "num_key_value_heads = 3",
            "[model] num_key_value_heads (3) must divide num_attention_heads (4)",
        ),
        (
            "microbatch = 4",
            "microbatch = 5",
            "[pipeline] global_batch (32) must be a multiple of microbatch (5)",
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[1, 16], [9, 32]]",
            "[pipeline] batch_ramp begins with round 1; begin it with [0, SAMPLES]",
        ),
        *(
            (
                "microbatch = 4",
                f"microbatch = 4\nbatch_ramp = {wrong}",
                "[pipeline] batch_ramp must be pairs of a round and samples, as [[0, 64], "
                "[2000, 256]]",
            )
            for wrong in ("[0, 32]", "[[0, 8, 32]]", "[[0, 8.0], [9, 32]]", "[[0, 8], [-9, 32]]")
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[0, 16], [9, 16], [10, 32]]",
            "[pipeline] batch_ramp has [9, 16] after [0, 16]; rounds and samples must both grow",
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[0, 16], [9, 32], [9, 64]]",
            "[pipeline] batch_ramp has [9, 64] after [9, 32]; rounds and samples must both grow",
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[0, 8], [9, 16]]",
            "[pipeline] batch_ramp ends with 16 samples, and global_batch is 32; make them the "
            "same",
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[0, 6], [9, 32]]",
            "[pipeline] batch_ramp has 6 samples; it must be a multiple of microbatch (4)",
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[0, -4], [9, 32]]",
            "[pipeline] batch_ramp has -4 samples; it must be a multiple of microbatch (4)",
        ),
        (
            "microbatch = 4",
            "microbatch = 4\nbatch_ramp = [[0, 16], [50, 32]]",
            "[pipeline] batch_ramp grows in round 50, and the last round is 49; leave that out, "
            "and lower global_batch",
        ),
        (
            "num_stages = 2",
            "num_stages = 5",
            "[pipeline] num_stages (5) must not be more than [model] num_hidden_layers (4)",
        ),
        (
            "warmup_rounds = 5",
            "warmup_rounds = 50",
            "[optimizer] warmup_rounds (50) must be less than rounds (50)",
        ),
        (
            "rounds = 50",
            "rounds = 50\nmomentum = 0.9",
            '[optimizer] momentum goes with kind = "muon"; AdamW has beta1',
        ),
        (
            "[pipeline]",
            'kind = "muon"\n[lora]\nr = 4\n[pipeline]',
            '[optimizer] kind = "muon" is for the matrices of decoder layers, which [lora] does '
            'not train; write kind = "adamw"',
        ),
        (
            "rounds = 50",
            'rounds = 50\nschedule = "linear"',
            "[optimizer] schedule = 'linear': input should be 'cosine', 'wsd' or 'constant'",
        ),
        (
            "rounds = 50",
            'rounds = 50\nschedule = "wsd"',
            '[optimizer] decay_rounds is missing; schedule = "wsd" lowers the rate in so many '
            "rounds, a tenth or a fifth of the run, say",
        ),
        (
            "rounds = 50",
            "rounds = 50\ndecay_rounds = 5",
            '[optimizer] decay_rounds goes with schedule = "wsd"; remove it',
        ),
        (
            "rounds = 50",
            'rounds = 50\nschedule = "wsd"\ndecay_rounds = 46',
            "[optimizer] warmup_rounds (5) and decay_rounds (46) together must not be more than "
            "rounds (50)",
        ),
        (
            "rounds = 50",
            "rounds = 0",
            "[optimizer] rounds must be at least 1; 0, for a run without an end, goes with "
            'schedule = "constant"',
        ),
        (
            "warmup_rounds = 5\nrounds = 50",
            'rounds = 0\nschedule = "constant"',
            "[optimizer] warmup_rounds must be given where the run has no end (rounds = 0); 0 for "
            "none",
        ),
        (
            "rounds = 50",
            'rounds = 0\nschedule = "constant"\n[sync]\nmode = "delayed"',
            "[sync] warmup_rounds must be given where the run has no end ([optimizer] rounds = 0), "
            "for it is a part of the run else",
        ),
        (
            "rounds = 50",
            'rounds = 50\n[sync]\ncodec = "int8"\ntopk_density = 0.05',
            '[sync] topk_density goes with codec = "topk"; remove it',
        ),
        *(
            (
                "rounds = 50",
                f'rounds = 50\n[sync]\nmode = "local"\ncodec = "topk"\ntopk_density = {density}',
                "[sync] topk_density is 0.5, or from 0.01 to 0.08",
            )
            for density in (0.009, 0.081, 0.25)
        ),
        (
            "rounds = 50",
            'rounds = 50\n[sync]\nmode = "local"\ncodec = "topk"\ntopk_density = 0.6',
            "[sync] topk_density = 0.6: input should be less than or equal to 0.5",
        ),
        (
            "vocab_size = 256",
            "vocab_size = 255",
            '[model] vocab_size (255) must be at least 256 for tokenizer = "bytes"',
        ),
        (
            'paths = ["python-stdlib"]',
            "",
            '[data] paths is missing; name text files or folders, or "python-stdlib"',
        ),
        (
            'paths = ["python-stdlib"]',
            'paths = ["x"]\ninclude = ["../*"]',
            "[data] include '../*' must be a file name's glob, without folders",
        ),
        (
            "seed = 7",
            'name = "a\\u001b[2Jb"',
            "name has control characters; write plain text on one line",
        ),
        (
            'kind = "llama"',
            'kind = "llama"\nbuilder = "x.py:f"',
            '[model] builder and options are for kind = "custom" only; remove them',
        ),
    ],
)
def test_a_wrong_spec_is_one_line_that_says_what_to_do(old: str, new: str, message: str) -> None:
    assert failure(change(old, new)) == message


def test_custom_models_need_a_builder_and_no_data() -> None:
    spec = parse_spec(CUSTOM)
    assert spec.model.options == {"width": 32, "deep": [1, 2]}
    assert spec.data.paths == ()
    assert "path/file.py:function" in failure(change("my_model.py:build", "my_model", CUSTOM))
    assert "options may hold" in failure(change("width = 32", "width = 2020-01-01", CUSTOM))
    wrong = change('kind = "custom"', 'kind = "custom"\nhidden_size = 3', CUSTOM)
    assert "[model.options]" in failure(wrong)


def test_key_value_heads_default_to_the_attention_heads() -> None:
    assert parse_spec(change("num_key_value_heads = 2", "")).model.num_key_value_heads == 4


def test_what_is_no_toml_or_no_file_is_said_in_one_line(tmp_path: Path) -> None:
    assert failure("a b").startswith("not valid TOML: ")
    assert "longer than" in failure("#" * (MAX_SPEC_BYTES + 1))
    with pytest.raises(SpecError, match=r"cannot read .*missing.toml: No such file"):
        load_spec(tmp_path / "missing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="is UTF-16 text; save it as UTF-8"):
        load_spec(binary)


def test_the_canonical_form_survives_the_journey_to_a_peer() -> None:
    for text in (LLAMA, CUSTOM):
        spec = parse_spec(text)
        again = RunSpec.from_canonical(spec.canonical())
        assert again == spec
        assert again.run_id == spec.run_id
        assert re.fullmatch(r"[0-9a-f]{32}", spec.run_id)


def test_the_run_id_depends_on_the_meaning_and_not_on_the_writing() -> None:
    spec = parse_spec(LLAMA)
    assert parse_spec("# a comment\n" + change("0.003", "3e-3")).run_id == spec.run_id
    assert parse_spec(change("seed = 7", "seed = 8")).run_id != spec.run_id


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        b'{"model":1}',
        b" " * (MAX_SPEC_BYTES + 1),
        parse_spec(LLAMA).canonical() + b" ",
        parse_spec(LLAMA).canonical().replace(b'"seed":7', b'"seed":NaN'),
    ],
)
def test_a_hostile_spec_from_a_peer_is_refused(data: bytes) -> None:
    with pytest.raises(SpecError, match="the swarm's spec: "):
        RunSpec.from_canonical(data)


def test_other_rounds_keep_the_rest_and_fit_the_warm_up() -> None:
    spec = parse_spec(LLAMA)
    assert spec.with_rounds(100).optimizer.warmup_rounds == 5
    short = spec.with_rounds(5)
    assert short.optimizer.warmup_rounds < 5
    assert short.model == spec.model
    with pytest.raises(SpecError, match="rounds"):
        spec.with_rounds(0)
    assert spec.with_seed(3).seed == 3


@pytest.mark.parametrize("rounds", [1, 2, 3, 19, 20, 21, 50, 1000])
def test_other_rounds_fit_the_decay(rounds: int) -> None:
    wsd = 'rounds = 50\nschedule = "wsd"\ndecay_rounds = 15'
    optimizer = parse_spec(change("rounds = 50", wsd)).with_rounds(rounds).optimizer
    assert optimizer.rounds == rounds
    if rounds >= 20:
        assert (optimizer.warmup_rounds, optimizer.decay_rounds) == (5, 15)
    else:
        assert optimizer.decay_rounds == max(15 * rounds // 50, 1)
        assert optimizer.warmup_rounds == 5 * rounds // 50


def test_a_batch_may_grow() -> None:
    grown = change("microbatch = 4", "microbatch = 4\nbatch_ramp = [[0, 8], [10, 16], [30, 32]]")
    spec = parse_spec(grown)
    assert "global batch 8, 16 from round 10 on, 32 from round 30 on in micro" in describe(spec)
    pipeline = spec.pipeline
    assert [pipeline.batch_of(r) for r in (0, 9, 10, 29, 30, 49)] == [8, 8, 16, 16, 32, 32]
    assert pipeline.samples_before(31) == 10 * 8 + 20 * 16 + 32
    assert pipeline.rounds_of(10 * 8 + 1) == 11
    resolved = spec.resolved(layers=[3, 3], shard_parameters=4096)
    assert RunSpec.from_canonical(resolved.canonical()) == resolved
    assert spec.run_id != parse_spec(LLAMA).run_id
    short = spec.with_rounds(30).pipeline
    assert (short.batch_ramp, short.global_batch) == (((0, 8), (10, 16)), 16)
    assert spec.with_rounds(60).pipeline == pipeline


def test_a_run_may_have_no_end() -> None:
    spec = parse_spec(change("rounds = 50", 'rounds = 0\nschedule = "constant"'))
    assert spec.is_endless
    assert describe(spec).endswith(", without an end")
    resolved = spec.resolved(layers=[3, 3], shard_parameters=4096)
    assert not resolved.open_keys
    assert RunSpec.from_canonical(resolved.canonical()) == resolved
    assert resolved.optimizer.end > 10**12
    for mode in ("local", "delayed"):
        sync = f'[sync]\nmode = "{mode}"\nwarmup_rounds = 7\n'
        in_mode = parse_spec(change("rounds = 50", 'rounds = 0\nschedule = "constant"') + sync)
        assert in_mode.sync_warmup_rounds == 7
    short = spec.with_rounds(4)
    assert not short.is_endless
    assert (short.optimizer.rounds, short.optimizer.warmup_rounds) == (4, 3)
    of_epochs = parse_spec(
        change(PATHS, f"{PATHS}\nepochs = 1.5", change("rounds = 50", 'schedule = "constant"'))
    )
    assert not of_epochs.is_endless


def test_the_parameters_are_those_of_the_architecture() -> None:
    # embedding and head, then per layer: q, o, k, v, three of the feed-forward, two norms
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176 + 2 * 64
    assert parse_spec(LLAMA).model.num_parameters == 2 * 256 * 64 + 4 * layer + 64


def test_every_field_is_documented() -> None:
    for name, table in TABLES.items():
        for field, info in table.model_fields.items():
            assert info.description, f"[{name}] {field}"


def test_a_spec_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tomllib.loads(LLAMA)))
    assert load_spec(path) == parse_spec(LLAMA)
    for text, line in (
        ("{", r"^run\.json: not valid JSON: "),
        ("[]", r"^run\.json: a spec is a table$"),
        ('{"seed": NaN}', r"^run\.json: "),
        ("[" * 60_000, r"^run\.json: not valid JSON: "),
        (LLAMA, r"^run\.json: not valid JSON: "),
    ):
        path.write_text(text)
        with pytest.raises(SpecError, match=line):
            load_spec(path)


def test_the_values_of_a_spec_make_it_again() -> None:
    endless = 'rounds = 0\nschedule = "constant"'
    without_end = LLAMA.replace("rounds = 50", endless).replace("_rounds = 5", "_rounds = 0")
    for text in (LLAMA, CUSTOM, without_end):
        for codecs in ("", '[sync]\ncodec = "none"\n'):
            spec = parse_spec(text if "[sync]" in text else text + codecs)
            values = json.loads(json.dumps(values_of_spec(spec)))
            assert spec_of_values(values, "x") == spec


def test_a_description_is_one_line() -> None:
    assert "\n" not in describe(parse_spec(LLAMA))
    assert "my_model.py:build" in describe(parse_spec(CUSTOM))


def test_the_embedded_default_is_a_valid_spec() -> None:
    spec = load_spec(default_spec_path())
    assert spec.data.paths == ("python-stdlib",)


def test_the_specs_of_examples_and_recipes_are_valid() -> None:
    root = Path(__file__).parent.parent
    examples = sorted((root / "examples").glob("*.toml"))
    assert len(examples) >= 2
    for path in examples:
        load_spec(path)
    for page in ("README.md", "docs/finetune.md", "docs/pretrain.md"):
        shown = re.findall(r"```toml\n(.*?)```", (root / page).read_text(), re.DOTALL)
        assert shown
        for text in shown:
            parse_spec(text, page)


# ---- data -------------------------------------------------------------------------------------

PATHS = 'paths = ["python-stdlib"]'
SOURCE = '[[data.source]]\npaths = "{}"\n'


def test_a_single_path_needs_no_brackets() -> None:
    one = parse_spec(change(PATHS, 'paths = "python-stdlib"'))
    assert one.run_id == parse_spec(LLAMA).run_id


def test_a_byte_order_mark_is_no_part_of_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + LLAMA.encode())
    assert load_spec(path).run_id == parse_spec(LLAMA).run_id


def test_several_sources_survive_the_journey_to_a_peer() -> None:
    text = change(PATHS, SOURCE.format("a") + SOURCE.format("b") + 'name = "notes"\nweight = 2')
    spec = parse_spec(text)
    assert [source.name for source in spec.data.sources] == ["1", "notes"]
    assert RunSpec.from_canonical(spec.canonical()) == spec
    assert b'"source":[{"paths":["a"]},' in spec.canonical()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            f"{PATHS}\n{SOURCE.format('a')}",
            "[data] paths belongs into each [[data.source]]; remove it here",
        ),
        (
            f'epoch_of = "x"\n{SOURCE.format("a")}',
            "[data] epoch_of must be one of 1",
        ),
        (f'{PATHS}\nepoch_of = "x"', "[data] epoch_of is for several [[data.source]]; remove it"),
        (
            SOURCE.format("a") + 'name = "2"\n' + SOURCE.format("b"),
            "[data] [[data.source]]: two have the same name",
        ),
        (
            SOURCE.format("a") + "weigth = 2",
            "[[data.source]] weigth is unknown; did you mean weight?",
        ),
        (
            SOURCE.format("a") + "weight = 1e-6\n" + SOURCE.format("b"),
            "[data] weight: a source must have at least 1 of 1000 samples",
        ),
        (
            SOURCE.format("a") + "weight = -1",
            "[[data.source]] number 1: weight = -1: input should be greater than 0",
        ),
        (
            "[[data.source]]",
            "[[data.source]] number 1: paths is missing; name text files or folders",
        ),
        (
            f"{PATHS}\nepochs = 2",
            "[optimizer] rounds and [data] epochs both say how long the run is; remove one",
        ),
    ],
)
def test_wrong_data_is_one_line(data: str, message: str) -> None:
    assert failure(change(PATHS, data)) == message


def test_a_run_may_be_as_long_as_its_epochs() -> None:
    spec = parse_spec(change(PATHS, f"{PATHS}\nepochs = 1.5", change("rounds = 50", "")))
    assert (spec.data.epochs, spec.optimizer.rounds) == (1.5, 0)
    assert describe(spec).endswith("1.5 epochs")


@pytest.mark.parametrize(("given", "codec"), [("", "topk"), ("0.5", "topk"), ("0.05", "topk-208")])
def test_topk_is_as_it_was_unless_a_density_is_given(given: str, codec: str) -> None:
    """The key is not written at its default."""
    density = f"topk_density = {given}\n" if given else ""
    spec = parse_spec(LLAMA + f'[sync]\nmode = "local"\ncodec = "topk"\n{density}')
    assert spec.sync.update_codec == codec
    assert (b"topk_density" in spec.canonical()) is (codec != "topk")
    assert RunSpec.from_canonical(spec.canonical()) == spec
