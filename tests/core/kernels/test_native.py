# SPDX-License-Identifier: Apache-2.0
"""C and torch give the same bits, with whatever instructions; and how the C is made."""

from __future__ import annotations

import itertools
import math
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.core.kernels.natives import agree, same, same_bits
from tests.grids import fast_where
from thinwire.core import kernels
from thinwire.core.kernels import base, native
from thinwire.core.kernels.reference import rng as reference_rng
from thinwire.core.kernels.reference import signs

SIZES = fast_where(lambda n: n in (1, 9, 33, 2047), (1, 7, 8, 9, 31, 33, 1000, 2047, 9001))


def special(n: int, seed: int = 0) -> Tensor:
    """Numbers with all that is special about floats."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x[1::11], x[2::13], x[3::17] = -0.0, 1e-42, 3e38
    x[n // 2 : n // 2 + 300] *= 1e-30
    x[n // 3 : n // 3 + 100] = 0
    return x


def nothing(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0x55, dtype=torch.uint8)


def parts(payload: Tensor, count: int, nbytes: int) -> list[Tensor]:
    """The scales of so many blocks, and the rest."""
    head = payload[: count * nbytes].clone()
    return [head.view(torch.float32) if nbytes == 4 else head, payload[count * nbytes :]]


def by_signs(x: Tensor, block: int, norm: Literal["l1", "l2"], nbytes: int = 4) -> list[Tensor]:
    n, how = len(x), {"block": block, "scale_bytes": nbytes}
    rest, total, decoded = special(n, 1) / 4, torch.empty(n), torch.empty(n)
    payload, plain = nothing(2 * kernels.sign_nbytes(n, block, nbytes)).view(2, -1)
    kernels.encode_signs_(x, rest, payload, norm=norm, **how)
    kernels.encode_signs_(x, None, plain, norm=norm, **how)
    kernels.decode_signs_(payload, decoded, **how)
    several = torch.stack([payload, plain, payload])
    several[1, -1] ^= 1
    kernels.sum_signs_(several, total, **how)
    count = -(-n // block)
    return [*parts(payload, count, nbytes), *parts(plain, count, nbytes), rest, decoded, total]


def by_few_bits(
    x: Tensor, bits: int, block: int, norm: Literal["max", "l2"], nbytes: int = 4, shift: float = 0.0
) -> list[Tensor]:
    n = len(x)
    payload = nothing(kernels.quantized_nbytes(n, bits, block, nbytes))
    how: dict[str, Any] = {"bits": bits, "block": block, "key": n, "shift": shift, "scale_bytes": nbytes}
    kernels.quantize_(x, payload, norm=norm, **how)
    decoded = torch.empty(2, n)
    for dither in (False, True):
        kernels.dequantize_(payload, decoded[int(dither)], dither=dither, **how)
    return [*parts(payload, -(-n // block), nbytes), decoded]


def by_nearest_levels(x: Tensor, bits: int, block: int) -> list[Tensor]:
    rest, decoded = special(len(x), 1) / 4, torch.empty(len(x))
    payload, plain = nothing(2 * kernels.quantized_nbytes(len(x), bits, block)).view(2, -1)
    kernels.encode_rounded_(x, rest, payload, bits=bits, block=block)
    kernels.decode_rounded_(payload, decoded, bits=bits, block=block)
    kernels.encode_rounded_(x, None, plain, bits=bits, block=block)
    return [payload, rest, decoded, plain]


def by_chunks(x: Tensor, bits: int, chunk: int, kept: int) -> list[Tensor]:
    how = {"chunk": chunk, "kept": kept, "bits": bits}
    rest, decoded = special(len(x), 1) / 4, torch.ones(len(x))
    payload = nothing(kernels.chunked_nbytes(len(x), chunk, kept, bits))
    kernels.encode_chunks_(x, rest, payload, **how)
    kernels.add_chunks_(payload, decoded, **how)
    return [payload, rest, decoded]


def by_sketch(x: Tensor, rows: int, columns: int) -> list[Tensor]:
    n, table = len(x), torch.ones(rows, columns)
    kernels.sketch_(x, table, key=n, scale=0.3)
    estimates = kernels.unsketch(table, None, n, key=n) + 0.0  # zeros have no sign
    for some in (torch.arange(n).flip(0)[::3], torch.arange(n)[: n // 2 + 1], torch.tensor([n - 1, 0, n - 1])):
        assert same(kernels.unsketch(table, some, n, key=n) + 0.0, estimates[some])
    heavy = [] if x.isnan().any() else [kernels.heavy(table, n, k, key=n) for k in {1, n // 2, n} - {0}]
    return [table, estimates, *heavy]


def by_largest(x: Tensor, k: int) -> list[Tensor]:
    places = kernels.top_k(x, k)
    packed = kernels.pack_indices(places, len(x))
    return [places, packed, kernels.unpack_indices(packed, len(x), k)]


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", SIZES)
def test_c_and_torch_give_the_same_bits(n: int) -> None:
    x, product = special(n), itertools.product
    for block, norm, nbytes in product((1, 3, 8, 40, 128, 2048, n), ("l1", "l2"), (2, 4)):
        agree(by_signs, x, block, norm, nbytes)
    few = special(n)
    few[3::17] = 3e18
    for bits, block, how in product(range(1, 9), (3, 100, 2048, n), (("max", 4), ("l2", 2, 0.375), ("max", 2, 0.7))):
        agree(by_few_bits, few, bits, block, *how)
    # Sums with what is left are finite: others are not encoded.
    for bits, block in product(range(1, 9), (3, 100, 2048, n)):
        agree(by_nearest_levels, x / 4, bits, block)
    for bits, (chunk, kept) in product((1, 2, 5, 8), ((2, 1), (16, 3), (100, 100), (4096, 64), (16384, 17))):
        agree(by_chunks, x / 4, bits, chunk, kept)
    for rows, columns in ((1, 1), (3, 7), (5, 64), (5, 600), (7, 5000), (4, 513), (17, 40)):
        agree(by_sketch, x, rows, columns)
    for k in {1, n // 3, n} - {0}:
        agree(by_largest, x, k)
    agree(lambda: [kernels.uniform(n, n, 2**33 + 5)])


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", [1, 9, 300, 4100])
def test_nan_and_infinity_give_the_same_by_c_and_by_torch(n: int) -> None:
    x = special(n)
    x[n // 4], x[n // 2], x[-1] = math.inf, -math.inf, math.nan
    for block, norm in itertools.product((8, 13, 2048), ("l1", "l2")):
        agree(by_signs, x, block, norm)
        agree(by_few_bits, x, 4, block, "max")
    agree(by_sketch, x, 3, 70)


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("n", [5, 300])
def test_scales_of_finite_numbers_whose_sums_overflow_are_finite_and_the_same(norm: str, n: int) -> None:
    x = torch.where(torch.arange(n) % 3 == 0, 2e38, special(n) / 4)
    for block in (8, n):
        scales, _, _, _, rest, _, _ = agree(by_signs, x, block, norm)
        assert scales.isfinite().all() and rest.isfinite().all()
    assert agree(by_few_bits, x / 4, 4, 8, "l2")[0].isfinite().all()


@pytest.mark.usefixtures("by_c")
def test_scales_between_two_of_16_bits_go_to_the_even_one() -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8])
    payload, decoded = nothing(kernels.sign_nbytes(4, 1, 2)), torch.empty(4)
    kernels.encode_signs_(x, None, payload, block=1, scale_bytes=2)
    kernels.decode_signs_(payload, decoded, block=1, scale_bytes=2)
    assert decoded.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0] == x.bfloat16().tolist()


@pytest.mark.usefixtures("by_c")
def test_no_draw_lifts_the_largest_element_above_the_highest_code() -> None:
    n = 1 << 19
    draws = reference_rng.uniform(n, 5)
    # In fp32 the sum of the highest code and a draw just below 1 is the next whole number.
    assert bool((254 + draws == 255).any())
    payload, decoded = nothing(kernels.quantized_nbytes(n, 8, n)), torch.empty(n)
    kernels.quantize_(torch.ones(n), payload, bits=8, block=n, key=5)
    kernels.dequantize_(payload, decoded, bits=8, block=n, key=5)
    assert bool((decoded == 1).all())


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("skipped", [1, 3, 5])
def test_vectors_and_payloads_may_begin_anywhere(skipped: int) -> None:
    n, x, rest = 3001, special(3001 + skipped), special(3001 + skipped, 1)
    for block in (8, 13, 2048):
        nbytes = kernels.sign_nbytes(n, block)
        ours, theirs = rest.clone()[skipped:], rest.clone()[skipped:].clone()
        room, expected = nothing(nbytes + 2 * skipped), nothing(nbytes)
        kernels.encode_signs_(x[skipped:], ours, room[skipped:-skipped], block=block)
        signs.encode_signs_(x[skipped:].clone(), theirs, expected, block=block, norm="l1", scale_bytes=4)
        assert room[skipped:-skipped].equal(expected) and same_bits(ours, theirs)
        assert (room[:skipped] == 0x55).all() and (room[-skipped:] == 0x55).all()
        kernels.decode_signs_(room[skipped:-skipped], ours, block=block)
        signs.decode_signs_(expected, theirs, block=block, scale_bytes=4)
        assert same_bits(ours, theirs)
        nbytes = kernels.quantized_nbytes(n, 3, block)
        room, expected = nothing(nbytes + 2 * skipped), nothing(nbytes)
        kernels.quantize_(x[skipped:], room[skipped:-skipped], bits=3, block=block, key=1)
        kernels.quantize_(x[skipped:].clone(), expected, bits=3, block=block, key=1)
        assert room[skipped:-skipped].equal(expected)
        assert (room[:skipped] == 0x55).all() and (room[-skipped:] == 0x55).all()


# -- how it is made ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "problems", {})
    native.warn_of_slow_path.cache_clear()
    if native.library("probe", b"long thinwire_one(void) { return 1; }", []) is None:
        pytest.skip("no C compiler")
    return tmp_path / "cache" / "native"


def test_a_library_is_compiled_once_into_a_private_folder(cache_folder: Path) -> None:
    (made,) = cache_folder.iterdir()
    before = made.stat()
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert native.library("probe", b"long thinwire_one(void) { return 1; }", []) is not None
    assert [(each, each.stat().st_mtime_ns) for each in cache_folder.iterdir()] == [(made, before.st_mtime_ns)]


def test_another_source_and_other_flags_are_another_library(cache_folder: Path) -> None:
    for source, flags in (
        (b"long thinwire_one(void) { return 2; }", []),
        (b"long thinwire_one(void) { return 1; }", ["-O1"]),
    ):
        found = native.library("probe", source, flags)
        assert found is not None and found.thinwire_one() == int(source[-4:-3])
    assert len(list(cache_folder.iterdir())) == 3


SOURCE = b"long thinwire_one(void) { return 1; }"


@pytest.mark.parametrize("damage", ["half", "empty", "foreign", "one bit", "link", "writable"])
def test_a_library_that_is_not_what_was_compiled_is_never_loaded_and_made_anew(
    damage: str, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = cache_folder.iterdir()
    whole = made.read_bytes()
    other = native.library("other", b"long thinwire_other(void) { return 3; }", [])
    assert other is not None
    changed = {
        "half": whole[: len(whole) // 2],
        "empty": b"",
        "foreign": Path(other._name).read_bytes(),
        "one bit": whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:],
    }
    made.unlink()  # another file: this process has the first one loaded
    made.write_bytes(changed.get(damage, whole))
    if damage == "link":
        made.rename(tmp_path / "elsewhere.so")
        made.symlink_to(tmp_path / "elsewhere.so")
    made.chmod(0o722 if damage == "writable" else 0o700, follow_symlinks=True)
    loaded, load = list[str](), native.ctypes.CDLL
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: (loaded.append(made.read_bytes()), load(path))[1])
    found = native.library("probe", SOURCE, [], symbols=["thinwire_one"])
    assert found is not None and found.thinwire_one() == 1
    assert loaded == [whole]
    assert made.is_file() and not made.is_symlink() and not made.stat().st_mode & 0o022


def test_a_library_without_a_function_is_not_used(cache_folder: Path) -> None:
    (made,) = cache_folder.iterdir()
    other = native.library("other", b"long thinwire_other(void) { return 3; }", [])
    assert other is not None
    # Under a name that fits its bytes.
    foreign = made.with_name(f"{made.stem.rpartition('-')[0]}-{Path(other._name).stem.rpartition('-')[2]}.so")
    made.unlink()
    Path(other._name).rename(foreign)
    found = native.library("probe", SOURCE, [], symbols=["thinwire_one"])
    assert found is not None and found.thinwire_one() == 1


def test_a_filled_cache_needs_no_compiler(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = native.library("probe", SOURCE, [], symbols=["thinwire_one"])
    assert found is not None and found.thinwire_one() == 1
    (made,) = cache_folder.iterdir()
    made.unlink()  # another file: a loaded one that is cut short ends this process with SIGBUS
    made.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="no C compiler was found. Install gcc or clang"):
        assert native.library("probe", SOURCE, [], symbols=["thinwire_one"]) is None


def test_the_slow_path_is_told_once_with_its_reason(cache_folder: Path) -> None:
    before = list(cache_folder.iterdir())
    with pytest.warns(RuntimeWarning, match=r"kernels are not used \(the compiler \S+ failed: .*error.*thinwire tools"):
        assert native.library("broken", b"this is not C", []) is None
    with warnings.catch_warnings(action="error"):
        assert native.library("broken", b"this is not C", []) is None
    assert native.problems.pop("broken").startswith("the compiler")
    assert list(cache_folder.iterdir()) == before


def test_several_may_compile_at_once(cache_folder: Path) -> None:
    source = b"long thinwire_one(void) { return 5; }"
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: native.library("race", source, []), range(6)))
    assert [each is not None and each.thinwire_one() for each in found] == [5] * 6
    assert len([each for each in cache_folder.iterdir() if each.name.startswith("race-")]) == 1
    assert not [each for each in cache_folder.iterdir() if each.is_dir()]


def test_a_folder_that_others_may_write_to_is_not_trusted(cache_folder: Path) -> None:
    for mode in (0o770, 0o707):
        cache_folder.chmod(mode)
        native.warn_of_slow_path.cache_clear()
        with pytest.warns(RuntimeWarning, match="others may write to it"):
            assert native.library("probe", b"long thinwire_one(void) { return 1; }", []) is None
    cache_folder.chmod(0o700)
    assert native.library("probe", b"long thinwire_one(void) { return 1; }", []) is not None


@pytest.mark.parametrize(
    ("system", "names", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/thinwire"),
        ("linux", {"HOME": "/h"}, "/h/.cache/thinwire"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Caches/thinwire"),
        ("linux", {"THINWIRE_CACHE": "/mine", "XDG_CACHE_HOME": "/x"}, "/mine"),
    ],
)
def test_the_cache_is_where_the_system_keeps_caches(
    system: str, names: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("THINWIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native.sys, "platform", system)
    assert native.cache_folder() == Path(folder)


def test_without_a_compiler_torch_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, payloads = special(500), list[Tensor]()

    def quantize() -> None:
        base._compiled.cache_clear()
        payloads.append(nothing(kernels.quantized_nbytes(500, 4, 64)))
        kernels.quantize_(x, payloads[-1], bits=4, block=64, key=1)

    quantize()
    for name, value in {"PATH": tmp_path, "THINWIRE_CACHE": tmp_path / "empty"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CC", raising=False)
    native.warn_of_slow_path.cache_clear()
    with pytest.warns(RuntimeWarning, match="no C compiler was found"):
        quantize()
    assert base.compiled(x) is None
    assert payloads[0].equal(payloads[1])
    base._compiled.cache_clear()
    native.problems.clear()


def test_native_code_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_NATIVE", "0")
    assert base.compiled(torch.empty(1)) is None
    monkeypatch.setenv("THINWIRE_NATIVE", "1")
    assert base.compiled(torch.empty(1, device="meta")) is None
