"""What people write of their machines, and what is refused with an example."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.planning.cards import CARDS, card_named
from peer.planning.machines import Links, in_houses, peers_here, read_links, read_machines
from swarmnet.errors import UsageError


def test_a_list_of_machines() -> None:
    found = read_machines("24GB-gpu*2, RTX 4090+64GB, 16GB-cpu*3, mac-32GB, 8GB-gpu@20TFLOPS")
    assert [m.name for m in found[:3]] == ["24GB-gpu", "24GB-gpu", "RTX 4090"]
    assert len(found) == 8
    assert [m.device_gb for m in found] == [24, 24, 24, 16, 16, 16, 32, 8]
    assert [m.is_gpu for m in found] == [True] * 3 + [False] * 4 + [True]
    assert found[2].host_gb == 64
    assert found[2].card == CARDS["rtx4090"]
    assert found[-1].flops_per_s == 20e12
    assert found[3].free_device_bytes == 14e9, "the system has a part"
    assert found[0].note, "nobody said which card"
    assert [m.precision("auto") for m in found[2:4]] == ["bf16", "fp32"]


def test_a_card_computes_in_what_it_has() -> None:
    for text in ("NVIDIA GeForce RTX 4090", "rtx-4090", "rtx4090"):
        assert card_named(text) == CARDS["rtx4090"]
    assert card_named("A100-40GB") == CARDS["a100-40gb"]
    assert card_named("NVIDIA GeForce RTX 4060 Ti") == CARDS["rtx4060ti"]
    assert card_named("NVIDIA GeForce RTX 4060 Laptop GPU") is None, "it is a slower one"
    old = read_machines("T4")[0]
    assert old.precision("auto") == "fp16", "as a peer there would choose"
    links = read_links("20Mbit/100Mbit,30ms")
    assert old.machine("fp32", links, None).flops_per_s < 8.1e12
    assert old.machine("fp16", links, None).flops_per_s > 20e12


def test_a_card_that_is_unknown_is_told_of_those_like_it() -> None:
    with pytest.raises(UsageError, match=r"known cards like it: rtx4060") as refused:
        read_machines("RTX 4065*2")
    assert "h200" not in str(refused.value)
    with pytest.raises(UsageError, match=r"known: .*h200"):
        read_machines("voodoo*2")


def test_several_cards_in_one_machine() -> None:
    two, other, one = read_machines("2x24GB-gpu, 4 x RTX 4090+128GB, 24GB-gpu")
    assert (two.name, two.cards, two.device_gb, two.host_gb) == ("2x 24GB-gpu", 2, 24, 64)
    assert (other.cards, other.device_gb, other.host_gb) == (4, 24, 128)
    assert two.flops("bf16") == 2 * one.flops("bf16")
    assert one.between_bytes_per_s == one.host_bytes_per_s == 16e9, "half of PCIe 4 with 16 lanes"
    assert read_machines("h200")[0].between_bytes_per_s == 225e9
    links = read_links("20Mbit/100Mbit,30ms")
    card, same = two.divided(2, links, "machine 0", by_cards=True)
    assert (card, card.sharing) == (same, 2)
    assert card.links == links
    quick = read_links("10Gbit,0.1ms")
    (alone, _) = two.divided(2, quick, "machine 0", by_cards=True)
    assert (alone.sharing, alone.links) == (1, Links(quick.up / 2, quick.down / 2, 1e-4))
    assert (card.cards, card.device_gb, card.flops("bf16")) == (1, 24, one.flops("bf16"))
    assert card.free_host_bytes == two.free_host_bytes / 2
    seat, _ = one.divided(2, links, "machine 0", by_cards=False)
    assert (seat.device_gb, seat.flops("bf16")) == (12, one.flops("bf16") / 2)


@pytest.mark.parametrize("text", ["2x16GB-cpu", "0x24GB-gpu", "99x24GB-gpu", "2x mac-32GB"])
def test_cards_are_of_gpus(text: str) -> None:
    with pytest.raises(UsageError, match="2x24GB-gpu is one machine with two cards") as refused:
        read_machines(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "up", "down", "latency"),
    [
        ("20Mbit/100Mbit,30ms", 2.5e6, 12.5e6, 0.03),
        ("1Gbit/s, 0.5 ms", 125e6, 125e6, 0.0005),
        ("500kbit/2Mbit,0ms", 62.5e3, 250e3, 0),
    ],
)
def test_links(text: str, up: float, down: float, latency: float) -> None:
    found = read_links(text)
    assert (found.up, found.down, found.latency_s) == pytest.approx((up, down, latency))


@pytest.mark.parametrize(
    "text",
    [
        *("", "20/100", "20Mbit", "0Mbit,3ms", "20Mbit/100Mbit", "a,b", "-20Mbit,30ms"),
        *("9999999Gbit,3ms", "20Mbit,9999999ms"),
    ],
)
def test_links_that_cannot_be_read_are_a_line_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="20Mbit/100Mbit,30ms") as refused:
        read_links(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "gpu", "rtx1*2", "24GB-gpu*0", "24GB-gpu*99999", "GB-gpu,", "0GB-gpu", "-24GB-gpu"),
        *("24GB-gpu@0TFLOPS", "24GB-gpu+0GB", "9999999GB-gpu", "rtx4090*" + "9" * 5000),
    ],
)
def test_machines_that_cannot_be_read_are_a_line_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"24GB-gpu\*2") as refused:
        read_machines(text)
    assert "\n" not in str(refused.value)


def test_so_many_machines_in_a_row_share_a_link() -> None:
    links = read_links("20Mbit/100Mbit,30ms, house=2")
    found = in_houses(read_machines("24GB-gpu*3, 16GB-cpu"), links)
    assert [(m.household, m.sharing) for m in found] == [("house 1", 2)] * 2 + [("house 2", 2)] * 2
    one = found[0].machine("fp32", links, None)
    assert (one.up_bytes_per_s, one.down_bytes_per_s) == (1.25e6, 6.25e6)
    assert (one.house, one.has_key) == ("house 1", True)
    plain = read_links("20Mbit/100Mbit,30ms")
    alone = in_houses(read_machines("24GB-gpu"), plain)[0]
    assert not alone.machine("fp32", plain, None).has_key


@pytest.mark.parametrize("house", ["0", "5000", "-1", "two", ""])
def test_a_house_that_cannot_be_is_a_line_with_an_example(house: str) -> None:
    with pytest.raises(UsageError, match=",house=4 where four machines share") as refused:
        read_links(f"20Mbit/100Mbit,30ms,house={house}")
    assert "\n" not in str(refused.value)


def test_machines_of_a_household_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(
        """
        [[machine]]
        card = "rtx3090"
        count = 2
        household = "attic"
        up_mbit = 40
        [[machine]]
        card = "rtx4090"
        household = "attic"
        up_mbit = 40
        [[machine]]
        card = "rtx4090"
        up_mbit = 40
        [[machine]]
        card = "rtx4090"
        count = 2
        """
    )
    links = read_links("20Mbit,30ms,house=2")
    found = in_houses(read_machines(str(path)), links)
    houses = [(m.household, m.sharing) for m in found]
    assert houses == [("attic", 3)] * 3 + [("", 1)] + [("house 1", 2)] * 2
    ups = [m.machine("fp32", links, None).up_bytes_per_s for m in found]
    assert ups == pytest.approx([5e6 / 3] * 3 + [5e6] + [1.25e6] * 2)


def test_peers_on_this_machine() -> None:
    assert [peers_here(x) for x in ("here", "here*4", " HERE * 2 ")] == [1, 4, 2]
    assert peers_here("rtx4090*2") is None
    for text in ("here*0", "here*999"):
        with pytest.raises(UsageError, match=r"here\*4"):
            peers_here(text)
    with pytest.raises(UsageError, match="go with no others"):
        read_machines("here*2, rtx4090")


def from_file(folder: Path, text: str) -> list[object]:
    path = folder / "machines.toml"
    path.write_text(text)
    return list(read_machines(str(path)))


def test_a_file_of_machines(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(
        """
        [[machine]]
        name = "tower"
        card = "RTX 3090"
        count = 2
        up_mbit = 50
        hours = 8
        [[machine]]
        host_memory_gb = 64
        tflops = 1.5
        """
    )
    tower, other, plain = read_machines(str(path))
    assert tower == other
    assert (tower.device_gb, tower.host_gb, tower.hours, tower.is_gpu) == (24, 32, 8, True)
    assert tower.links is not None
    assert (tower.links.up, tower.links.down) == (6.25e6, 12.5e6)
    assert (plain.is_gpu, plain.device_gb, plain.flops_per_s) == (False, 64, 1.5e12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "machine"),
        ("[machine]\ncard = 'rtx4090'", "machine"),
        ("[[machine]]\ncard = 'rtx1'", "no card 'rtx1'"),
        ("[[machine]]\nmemory_gb = 24", "how fast"),
        ("[[machine]]\nname = 'x'", "tflops"),
        ("[[machine]]\ntflops = 2", "host_memory_gb"),
        ("[[machine]]\ncard = 'rtx4090'\nspeed = 2", "speed is unknown"),
        ("[[machine]]\ncard = 'rtx4090'\nhours = 25", "24 at most"),
        ("[[machine]]\ncard = 'rtx4090'\nup_mbit = 0", "up_mbit"),
        ("[[machine]]\ncard = 'rtx4090'\ncount = 'two'", "count"),
        ("[[machine]]\ncard = 'rtx4090'\ncount = 1.5", "a whole number above 0, 4,096 at most"),
        ("[[machine]]\ncard = 'rtx4090'\nup_mbit = -5", "a number above 0, 1,000,000 at most"),
        ("[[machine]]\ncard = 'rtx4090'\ndown_mbit = nan", "down_mbit"),
        ("[[machine]]\ncard = 'rtx4090'\nlatency_ms = -1", "a number from 0 on"),
        ("[[machine]]\ncard = 'rtx4090'\nname = \"a\\u001bb\"", "names are lines"),
        (f"[[machine]]\ncard = 'rtx4090'\nname = '{'x' * 41}'", "names are lines of 40"),
        ("[[machine]]\ncard = 'rtx4090'\nhousehold = 4", 'household = "attic"'),
        (f"[[machine]]\ncard = 'rtx4090'\nhousehold = '{'x' * 41}'", "names are lines of 40"),
        (
            "[[machine]]\ncard = 'rtx4090'\nhousehold = 'attic'\n"
            "[[machine]]\ncard = 'rtx4090'\nhousehold = 'attic'\nup_mbit = 40",
            "machine 2: machines of household 'attic' share one link; write the same up_mbit",
        ),
        ("[[machine]", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        from_file(tmp_path, text)
    assert "\n" not in str(refused.value)
