# SPDX-License-Identifier: Apache-2.0
"""C and torch give the same bits, with whatever instructions; and how the C is made."""

from __future__ import annotations

import itertools
import math
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.core.kernels.natives import by_c as by_c
from tests.core.kernels.natives import library as library
from tests.core.kernels.natives import same, same_bits
from tests.grids import fast_where
from thinwire.core import kernels
from thinwire.core.kernels import base, native
from thinwire.core.kernels.reference import chunks, largest, quantized, rounded, signs, sketched
from thinwire.core.kernels.reference import rng as reference_rng

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


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", SIZES)
def test_signs_are_bit_by_bit_those_of_torch(n: int) -> None:
    for block, norm, nbytes in itertools.product((1, 3, 8, 40, 128, 2048, n), ("l1", "l2"), (2, 4)):
        x, ours, theirs = special(n), special(n, 1), special(n, 1)
        payload, expected = (
            nothing(kernels.sign_nbytes(n, block, nbytes)),
            nothing(kernels.sign_nbytes(n, block, nbytes)),
        )
        kernels.encode_signs_(x, ours, payload, block=block, norm=norm, scale_bytes=nbytes)  # type: ignore[arg-type]
        signs.encode_signs_(x, theirs, expected, block=block, norm=norm, scale_bytes=nbytes)
        assert payload.equal(expected) and same_bits(ours, theirs)
        kernels.encode_signs_(x, None, payload, block=block, norm=norm, scale_bytes=nbytes)  # type: ignore[arg-type]
        signs.encode_signs_(x, None, expected, block=block, norm=norm, scale_bytes=nbytes)
        assert payload.equal(expected)
        several = torch.stack([payload, expected, payload])
        several[1, -1] ^= 1
        kernels.sum_signs_(several, ours, block=block, scale_bytes=nbytes)
        signs.sum_signs_(several, theirs, block=block, scale_bytes=nbytes)
        assert same_bits(ours, theirs)


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", SIZES)
def test_few_bits_are_bit_by_bit_those_of_torch(n: int) -> None:
    x, ours, theirs = special(n), torch.empty(n), torch.empty(n)
    x[3::17] = 3e18
    for bits, block, (norm, nbytes, shift) in itertools.product(
        range(1, 9), (3, 100, 2048, n), (("max", 4, 0.0), ("l2", 2, 0.375), ("max", 2, 0.7))
    ):
        how = {"bits": bits, "block": block, "key": n, "shift": shift, "scale_bytes": nbytes}
        size = kernels.quantized_nbytes(n, bits, block, nbytes)
        payload, expected = nothing(size), nothing(size)
        kernels.quantize_(x, payload, norm=norm, **how)  # type: ignore[arg-type]
        quantized.quantize_(x, expected, norm=norm, **how)  # type: ignore[arg-type]
        assert payload.equal(expected)
        for dither in (False, True):
            kernels.dequantize_(payload, ours, dither=dither, **how)  # type: ignore[arg-type]
            quantized.dequantize_(payload, theirs, dither=dither, **how)  # type: ignore[arg-type]
            assert same_bits(ours, theirs)


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", SIZES)
def test_nearest_levels_and_what_they_leave_are_bit_by_bit_those_of_torch(n: int) -> None:
    # Their sums are finite: others are not encoded.
    x, decoded, wanted = special(n) / 4, torch.empty(n), torch.empty(n)
    for bits, block in itertools.product(range(1, 9), (3, 100, 2048, n)):
        ours, theirs = special(n, 1) / 4, special(n, 1) / 4
        payload = nothing(kernels.quantized_nbytes(n, bits, block))
        expected = payload.clone()
        kernels.encode_rounded_(x, ours, payload, bits=bits, block=block)
        rounded.encode_rounded_(x, theirs, expected, bits=bits, block=block)
        assert payload.equal(expected) and same_bits(ours, theirs)
        kernels.decode_rounded_(payload, decoded, bits=bits, block=block)
        rounded.decode_rounded_(payload, wanted, bits=bits, block=block)
        assert same_bits(decoded, wanted)
        kernels.encode_rounded_(x, None, payload, bits=bits, block=block)
        rounded.encode_rounded_(x, None, expected, bits=bits, block=block)
        assert payload.equal(expected)


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", SIZES)
def test_the_largest_of_each_chunk_and_what_is_left_are_bit_by_bit_those_of_torch(n: int) -> None:
    x = special(n) / 4
    for bits, (chunk, kept) in itertools.product((1, 2, 5, 8), ((2, 1), (16, 3), (100, 100), (4096, 64), (16384, 17))):
        how = {"chunk": chunk, "kept": kept, "bits": bits}
        ours, theirs, decoded, wanted = special(n, 1) / 4, special(n, 1) / 4, torch.ones(n), torch.ones(n)
        payload = nothing(kernels.chunked_nbytes(n, chunk, kept, bits))
        expected = payload.clone()
        kernels.encode_chunks_(x, ours, payload, **how)
        assert chunks.encode_chunks_(x, theirs, expected, **how)
        assert payload.equal(expected) and same_bits(ours, theirs)
        kernels.add_chunks_(payload, decoded, **how)
        assert chunks.add_chunks_(payload, wanted, **how)
        assert same_bits(decoded, wanted)


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", SIZES)
def test_sketches_and_what_is_large_are_those_of_torch(n: int) -> None:
    x = special(n)
    assert kernels.uniform(n, n, 2**33 + 5).equal(reference_rng.uniform(n, n, 2**33 + 5))
    for rows, columns in ((1, 1), (3, 7), (5, 64), (5, 600), (7, 5000), (4, 513), (17, 40)):
        ours, theirs = torch.ones(rows, columns), torch.ones(rows, columns)
        kernels.sketch_(x, ours, key=n, scale=0.3)
        sketched.sketch_(x, theirs, key=n, scale=0.3)
        assert same_bits(ours, theirs)
        estimates = sketched.unsketch(ours, None, n, key=n)
        assert kernels.unsketch(ours, None, n, key=n).equal(estimates)
        for some in (torch.arange(n).flip(0)[::3], torch.arange(n)[: n // 2 + 1], torch.tensor([n - 1, 0, n - 1])):
            found = kernels.unsketch(ours, some, n, key=n)
            assert found.equal(estimates[some])
            assert same_bits(found, kernels.unsketch(ours, None, n, key=n)[some]) or rows not in (1, 3, 5)
        for k in {1, n // 2, n} - {0}:
            assert kernels.heavy(ours, n, k, key=n).equal(largest.top_k(estimates, k))
    for k in {1, n // 3, n} - {0}:
        places = kernels.top_k(x, k)
        assert places.equal(largest.top_k(x, k))
        packed = kernels.pack_indices(places, n)
        assert packed.equal(largest.pack_indices(places, (n - 1).bit_length()))
        assert kernels.unpack_indices(packed, n, k).equal(places)


def with_nan(n: int) -> Tensor:
    """Numbers with NaN and infinities."""
    x = special(n)
    x[n // 4], x[n // 2], x[-1] = math.inf, -math.inf, math.nan
    return x


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("n", [1, 9, 300, 4100])
def test_nan_and_infinity_give_the_same_by_c_and_by_torch(n: int) -> None:
    for block, norm in itertools.product((8, 13, 2048), ("l1", "l2")):
        ours, theirs, decoded, wanted = special(n, 1), special(n, 1), torch.empty(n), torch.empty(n)
        payload, expected = nothing(kernels.sign_nbytes(n, block)), nothing(kernels.sign_nbytes(n, block))
        kernels.encode_signs_(with_nan(n), ours, payload, block=block, norm=norm)  # type: ignore[arg-type]
        signs.encode_signs_(with_nan(n), theirs, expected, block=block, norm=norm, scale_bytes=4)
        assert payload[-(-n // block) * 4 :].equal(expected[-(-n // block) * 4 :]) and same(ours, theirs)
        kernels.decode_signs_(payload, decoded, block=block)
        signs.decode_signs_(expected, wanted, block=block, scale_bytes=4)
        assert same(decoded, wanted)
        how = {"bits": 4, "block": block, "key": 3, "shift": 0.0, "scale_bytes": 4}
        payload, expected = (
            nothing(kernels.quantized_nbytes(n, 4, block)),
            nothing(kernels.quantized_nbytes(n, 4, block)),
        )
        kernels.quantize_(with_nan(n), payload, norm="max", **how)  # type: ignore[arg-type]
        quantized.quantize_(with_nan(n), expected, norm="max", **how)  # type: ignore[arg-type]
        assert payload[-(-n // block) * 4 :].equal(expected[-(-n // block) * 4 :])
        kernels.dequantize_(payload, decoded, **how)  # type: ignore[arg-type]
        quantized.dequantize_(expected, wanted, dither=False, **how)  # type: ignore[arg-type]
        assert same(decoded, wanted)
    tables, places = torch.zeros(2, 3, 70), torch.arange(n).flip(0)
    kernels.sketch_(with_nan(n), tables[0], key=n)
    sketched.sketch_(with_nan(n), tables[1], key=n, scale=1.0)
    assert same(tables[0], tables[1])
    estimates = sketched.unsketch(tables[0], None, n, key=n)
    assert same(sketched.unsketch(tables[0], places, n, key=n), estimates[places])
    assert same(kernels.unsketch(tables[0], places, n, key=n), estimates[places])


@pytest.mark.usefixtures("by_c")
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("n", [5, 300])
def test_scales_of_finite_numbers_whose_sums_overflow_are_finite_and_the_same(
    norm: Literal["l1", "l2"], n: int
) -> None:
    x = torch.where(torch.arange(n) % 3 == 0, 3e38, special(n).nan_to_num(1.0, 1.0, 1.0))
    for block in (8, n):
        residuals, payloads = torch.zeros(2, n), nothing(2 * kernels.sign_nbytes(n, block)).view(2, -1)
        kernels.encode_signs_(x, residuals[0], payloads[0], block=block, norm=norm)
        signs.encode_signs_(x, residuals[1], payloads[1], block=block, norm=norm, scale_bytes=4)
        assert payloads[0].equal(payloads[1]) and same_bits(residuals[0], residuals[1])
        assert residuals.isfinite().all()
    codes = nothing(2 * kernels.quantized_nbytes(n, 4, 8)).view(2, -1)
    how = {"bits": 4, "block": 8, "key": 1, "norm": "l2"}
    kernels.quantize_(x / 4, codes[0], **how)  # type: ignore[arg-type]
    quantized.quantize_(x / 4, codes[1], shift=0.0, scale_bytes=4, **how)  # type: ignore[arg-type]
    assert codes[0].equal(codes[1])
    assert codes[0, : 4 * -(-n // 8)].clone().view(torch.float32).isfinite().all()


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


def test_exported_functions_have_the_prefix_of_the_package() -> None:
    folder = Path(kernels.__file__).parent / "c"
    for path in folder.glob("*.c"):
        lines = path.read_text().splitlines()
        exported = [line for line in lines if line[:5] in ("void ", "int64") and "(" in line]
        assert all("thinwire_" in line for line in exported)
