"""Containers of packed weights: their bytes, each check with an exception of its own, and damage of every kind."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from paperlm_kernels.neuzip import ContainerError, errors, from_bytes, fuzz, fuzz_files, pack, safetensors_file
from paperlm_kernels.neuzip.header import Section
from support_neuzip import bits_of, gaussian, patterns, same_bits

GOLDEN = Path(__file__).parent / "golden_neuzip"
SHA256 = {
    "default": "c02bbd851deb91c14234b62498e36a0b1a6424b4ef6eed4d4d4724af07fbbf00",
    "dense": "80797f34a6f8074f2880f959d8a763b154bf0b44ec037e54a5f2ee30db6d1488",
    "fast": "11a85862501ff96ffcc376a39da639c00c3b30565af6f26d0ac69dbd71acc613",
    "fix4": "448fc2bd75ac6924b443e8ee1cef8f01e3b5e014f7a77ba7ca592e8f900add2f",
    "lossy": "dfc965aa721c5d524c28a932f5ccdb61d39f3a2784ed42ac7df5f24dfc6ddc1a",
}
OPTIONS = {"lossy": {"mant_bits": 3, "block_norm": 512}}


def golden_weights():
    """Without a generator of random numbers, whose stream may change between versions: quantiles of the normal
    distribution in an order that a multiplication mixes, and some outliers."""
    count = 40_000
    place = np.arange(count, dtype=np.int64) * 7919 % count
    values = torch.special.ndtri((torch.from_numpy(place) + 0.5) / count) * 0.02
    values[::997] *= 2.0**60
    return values.bfloat16()


def container(**options):
    t = gaussian(1500)
    t[::100] *= 2.0**40
    return pack(t, raw="never", **{"profile": "fast", **options}).to_bytes()


def table(data):
    """Section -> place of its entry, offset and length."""
    count = struct.unpack_from("<I", data, 116)[0]
    rows = [(128 + 24 * i, *struct.unpack_from("<IIQQ", data, 128 + 24 * i)) for i in range(count)]
    return {Section(number): (entry, offset, length) for entry, number, _, offset, length in rows}


def changed(data, place, form, value, seal=True):
    out = bytearray(data)
    struct.pack_into(form, out, place, value)
    return fuzz.sealed(out) if seal else out


def of_section(data, section, form, value, at=0):
    return changed(data, table(data)[section][1] + at, form, value)


@pytest.mark.parametrize("name", SHA256)
def test_committed_containers_are_read_and_written_to_the_byte(name):
    data = (GOLDEN / f"{name}.nzb").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256[name] and len(data) < 200_000
    options = {"profile": "default" if name in OPTIONS else name, "raw": "never", **OPTIONS.get(name, {})}
    weights = golden_weights()
    packed = from_bytes(data)
    packed.verify()
    assert pack(weights, **options).to_bytes() == packed.to_bytes() == data
    assert name in OPTIONS or same_bits(packed.unpack(), weights)


def test_the_header_says_what_the_format_says_at_the_offsets_of_the_format():
    data = pack(gaussian(3000).view(30, 100), mant_bits=3, block_norm=512, norm_semantics="authors_v1", raw="never",
                ).to_bytes()  # fmt: skip
    assert data[:8] == b"\x89NZB\r\n\x1a\n"
    assert struct.unpack_from("<HH", data, 8) == (1, 0)
    assert list(data[16:28]) == [1, 1, 2, 12, 3, 9, 7, 4, 0, 0, 1, 2]
    assert struct.unpack_from("<I8Q", data, 28) == (3, 30, 100, 0, 0, 0, 0, 0, 0)
    numel, blocks, books, patches, sections, total = struct.unpack_from("<QIIIIQ", data, 96)
    assert (numel, blocks, books, sections, total) == (3000, 1, 1, 9, len(data))
    size = struct.unpack_from("<I", data, 12)[0]
    assert size == 128 + 9 * 24 + 4
    assert struct.unpack_from("<I", data, size - 4)[0] == zlib.crc32(data[: size - 4])
    for entry, offset, length in table(data).values():
        assert offset % 64 == 0
        assert struct.unpack_from("<I", data, entry + 4)[0] == zlib.crc32(data[offset : offset + length])
    assert table(data)[Section.PATCH][2] == 4 * patches


def test_the_sum_of_a_block_is_of_its_words_times_odd_numbers():
    t = gaussian(1500)
    packed = pack(t, profile="fast", raw="never")
    words = np.zeros(4096, object)
    words[:750] = bits_of(t).view(np.uint32)
    right = sum((2 * i + 1) * int(word) for i, word in enumerate(words)) % 2**32
    assert packed.header.blocks == 1 and packed.sections[Section.BLOCK_SUM].item() % 2**32 == right


E = errors
FIELD_DAMAGE = [
    ("<B", 0, 0x88, E.MagicError), ("<H", 8, 2, E.VersionError), ("<B", 17, 3, E.VersionError),
    ("<I", 12, 64, E.HeaderError), ("<I", 116, 65, E.HeaderError), ("<Q", 120, 64, E.TruncatedError),
    ("<B", 16, 4, E.HeaderError), ("<B", 18, 1, E.HeaderError), ("<B", 19, 13, E.HeaderError),
    ("<B", 20, 2, E.HeaderError), ("<B", 21, 9, E.HeaderError), ("<B", 22, 6, E.HeaderError),
    ("<B", 23, 255, E.HeaderError), ("<B", 24, 1, E.HeaderError), ("<B", 25, 1, E.HeaderError),
    ("<B", 26, 1, E.HeaderError), ("<B", 27, 9, E.HeaderError), ("<I", 28, 3, E.HeaderError),
    ("<Q", 88, 1, E.HeaderError), ("<Q", 32, 1501, E.ShapeError), ("<Q", 32, 2**63, E.ShapeError),
    ("<Q", 96, 1, E.ShapeError), ("<I", 104, 2, E.HeaderError), ("<I", 108, 2, E.HeaderError),
    ("<I", 112, 1, E.SectionError),
]  # fmt: skip


@pytest.mark.parametrize("form,place,value,error", FIELD_DAMAGE)
@pytest.mark.parametrize("check", ["full", "header", "none"])
def test_a_forged_field_of_the_header_is_refused_with_its_own_error(form, place, value, error, check):
    with pytest.raises(error):
        from_bytes(changed(container(), place, form, value), check)


@pytest.mark.parametrize("check", ["full", "header", "none"])
def test_a_code_0_without_its_patch_and_a_patch_without_it_are_refused(check):
    """Of such a code CPU and GPU could read different exponents."""
    t = gaussian(1500)
    t[::100] *= 2.0**40
    data = pack(t, profile="fix4", raw="never").to_bytes()
    start = table(data)[Section.PAYLOAD][1]
    for place, byte in ((start + 3, data[start + 3] & 0xF0), (start, data[start] | 1)):
        assert data[place] != byte
        with pytest.raises(E.PatchError, match="codes 0"):
            from_bytes(changed(data, place, "<B", byte), check)
    places = from_bytes(data).sections[Section.PATCH].numpy() & 0xFFFFFF
    assert 200 in places and 201 not in places
    byte = start + 100  # of the weights 200, which has a patch, and 201
    assert data[byte] & 15 == 0 and data[byte] >> 4
    with pytest.raises(E.PatchError, match="codes 0"):  # as many as there are patches, one elsewhere
        from_bytes(changed(data, byte, "<B", data[byte] >> 4), check)
    from_bytes(data, check)


def test_checksums_are_compared_as_far_as_is_asked_for():
    data = container()
    head = changed(data, 100, "<B", 1, seal=False)
    with pytest.raises(E.HeaderChecksumError):
        from_bytes(head, "header")
    for section, (_, offset, length) in table(data).items():
        for place in {offset, offset + length - 1}:
            damaged = bytearray(data)
            damaged[place] ^= 0x80
            with pytest.raises(E.SectionChecksumError, match=section.name):
                from_bytes(damaged)
    between = bytearray(data)
    between[table(data)[Section.BLOCK_DIR][1] - 1] ^= 1
    with pytest.raises(E.HeaderError, match="not zero"):
        from_bytes(between)
    from_bytes(between, "header")
    with pytest.raises(ValueError, match="full, header, none"):
        from_bytes(data, "all")


def test_every_truncation_is_refused():
    data = container()
    ends = {offset for _, offset, _ in table(data).values()} | {o + n for _, o, n in table(data).values()}
    for end in {*ends, *range(0, 400), *range(0, len(data), 97)} - {len(data)}:
        for check in ("full", "none"):
            with pytest.raises(ContainerError):
                from_bytes(data[:end], check)


@pytest.mark.parametrize(
    "at,value",
    [(8, 2**63), (8, 65), (8, 0), (16, 2**64 - 1), (16, 10), (0, Section.NORM), (0, Section.BLOCK_DIR), (0, 77)],
)
def test_a_section_out_of_bounds_misaligned_overlapping_missing_or_twice_is_refused(at, value):
    data = container()
    form = "<I" if at == 0 else "<Q"
    with pytest.raises(E.SectionError):
        from_bytes(changed(data, table(data)[Section.PLANE][0] + at, form, int(value)), "none")


def test_a_section_of_a_later_version_is_passed_over():
    data = container()
    size = struct.unpack_from("<I", data, 12)[0]
    # room for one entry more: the sections begin 64 bytes further, and a new one stands behind them
    head = bytearray(data[: size - 4]) + struct.pack("<IIQQ", 1000, 0, len(data) + 64, 3) + bytes(4)
    shift = 64 if -(-size // 64) != -(-(size + 24) // 64) else 0
    for entry, offset, _ in table(data).values():
        struct.pack_into("<Q", head, entry + 8, offset + shift)
    start = -(-size // 64) * 64
    whole = head + bytes(start + shift - len(head)) + data[start:]
    struct.pack_into("<Q", whole, size - 4 + 8, len(whole))
    whole += b"new" + bytes(61)
    struct.pack_into("<H", whole, 10, 1)
    struct.pack_into("<I", whole, 12, size + 24)
    struct.pack_into("<I", whole, 116, len(table(data)) + 1)
    struct.pack_into("<Q", whole, 120, len(whole))
    assert same_bits(from_bytes(fuzz.sealed(whole)).unpack(), from_bytes(data).unpack())


@pytest.mark.parametrize(
    "section,form,at,value,error",
    [
        (Section.CODEBOOK, "<B", 1, None, E.CodebookError),  # an exponent twice
        (Section.CODEBOOK, "<B", 20, 0x11, E.CodebookError),  # Kraft sum above 1
        (Section.CODEBOOK, "<B", 20, 0x0C, E.CodebookError),  # too long, and 0
        (Section.BLOCK_DIR, "<I", 0, 1, E.DirectoryError), (Section.BLOCK_DIR, "<I", 4, 2**31, E.DirectoryError),
        (Section.LANE_UNITS, "<B", 5, 255, E.DirectoryError),
        (Section.PATCH_DIR, "<I", 0, 1, E.PatchError), (Section.PATCH_DIR, "<I", 4, 0, E.PatchError),
        (Section.PATCH, "<I", 0, 1500, E.PatchError),  # behind the last weight
        (Section.PATCH, "<I", 0, 8192, E.PatchError), (Section.PATCH, "<I", 4, 0, E.PatchError),
        (Section.PATCH, "<I", 4, None, E.PatchError),  # a weight twice
    ],
)  # fmt: skip
def test_a_section_that_would_lead_a_decoder_astray_is_refused_whatever_is_checked(section, form, at, value, error):
    data = container()
    if value is None:
        (value,) = struct.unpack_from(form, data, table(data)[section][1])
    for check in ("full", "none"):
        with pytest.raises(error):
            from_bytes(of_section(data, section, form, value, at), check)
    with pytest.raises(E.CodebookError, match="241"):
        from_bytes(of_section(container(profile="fix4"), Section.CODEBOOK, "<B", 242))


def test_the_words_behind_the_payload_are_zeros():
    data = container()
    _, _, length = table(data)[Section.PAYLOAD]
    with pytest.raises(E.DirectoryError, match="not zero"):
        from_bytes(of_section(data, Section.PAYLOAD, "<I", 1, length - 4), "none")


def test_other_streams_than_were_written_are_found_while_decoding():
    data = container()
    units = table(data)[Section.LANE_UNITS][1]
    moved = bytearray(data)
    moved[units], moved[units + 1] = data[units] + 1, data[units + 1] - 1
    with pytest.raises(E.StreamError):
        from_bytes(fuzz.sealed(moved)).unpack()
    for section in (Section.PLANE, Section.PATCH, Section.BLOCK_SUM):
        at = 3 if section == Section.PATCH else 0
        place = table(data)[section][1] + at
        packed = from_bytes(changed(data, place, "<B", data[place] ^ 1))
        packed.unpack()
        with pytest.raises(E.BlockSumError):
            packed.verify()


def test_an_empty_tensor_of_axes_that_multiply_beyond_all_numbers_is_refused():
    data = pack(patterns([]).view(0, 3)).to_bytes()
    with pytest.raises(E.ShapeError):
        from_bytes(changed(data, 40, "<Q", 2**41))


@pytest.mark.parametrize("options", [{}, {"profile": "fix4"}, {"mant_bits": 1, "block_norm": 512}])
def test_no_bit_of_a_container_flips_unnoticed(options):
    """Each of them: those that a fuzz run draws may miss one."""
    data = pack(gaussian(300), raw="never", **{"profile": "fast", **options}).to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ContainerError):
            from_bytes(bytes(flipped)).unpack()


def test_ten_thousand_mutations_are_refused_or_harmless():
    outcomes = fuzz.run(10_000)
    assert sum(outcomes.values()) == 10_000
    names = {name for name in vars(errors) if name.endswith("Error")}
    assert names | {"ValueError"} <= set(outcomes) <= names | {"ValueError", "same weights", "other weights"}


def test_the_fuzzer_tells_a_file_in_which_a_name_stands_twice_and_a_crash(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(safetensors_file, "read_json", json.loads)
        with pytest.raises(AssertionError, match=r"mutation \d+ \(twice, .*not noticed"):
            fuzz.run(3000)
    monkeypatch.setattr(safetensors_file, "UNREADABLE", (ValueError, KeyError, TypeError, AttributeError))
    with pytest.raises(RecursionError):
        fuzz.run(3000)


@pytest.mark.parametrize("place", range(3), ids=[".nzm", "safetensors", "save_packed"])
def test_every_kind_of_damage_to_a_file_is_made_and_what_is_sealed_is_read_again(place, tmp_path):
    file = fuzz_files.sorts(tmp_path)[place]
    path, rng = tmp_path / "damaged", np.random.default_rng(1)
    path.write_bytes(file.sealed(file.data, path))
    whole = file.read(path)
    assert len(whole) > 2 and path.read_bytes() == file.data
    ends = {fuzz.of_file(file, whole, rng, path) for _ in range(400)}
    kinds = {*fuzz_files.FORGED, "bit", "bytes", "truncate", "extend", "unsealed"}
    assert {kind for kind, _ in ends} == {f"{kind}, {file.name}" for kind in kinds}
    # made to fit again: a weight is another, and nothing can tell
    assert (f"forged, {file.name}", "other weights") in ends or file.name == ".nzm"
    assert (f"renamed, {file.name}", "same weights") in ends and fuzz.UNNOTICED not in {end for _, end in ends}


def test_the_recorded_million_of_mutations_has_an_outcome_for_each_and_no_other_exception_than_a_refusal():
    recorded = json.loads((Path(__file__).parent.parent / "paper_tables/records/fuzz/neuzip.json").read_text())
    outcomes = recorded["outcomes"]
    assert sum(outcomes.values()) == recorded["mutations"] == 1_000_000
    assert set(outcomes) - {"same weights", "other weights", "ValueError"} <= {
        name for name in vars(errors) if name.endswith("Error")
    }
