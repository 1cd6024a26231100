"""The kernels of packed weights give the definition's bytes and bits, in both directions."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from paperlm_kernels.neuzip import from_bytes, fuzz, pack, raise_decode_errors
from paperlm_kernels.neuzip.errors import BlockSumError, ContainerError, StreamError
from paperlm_kernels.neuzip.geometry import PROFILES
from paperlm_kernels.neuzip.header import Codec, Section
from paperlm_kernels.neuzip.record import Packed
from support_neuzip import bits_of, compiled_or_interpreted, every_pattern, gaussian, odd_weights, patterns, same_bits

B = PROFILES["fast"].block
lossy = pytest.mark.parametrize("k,norm", [(7, None), (3, 512), (1, 32), (0, None), (0, 1024)])


@compiled_or_interpreted
@lossy
@pytest.mark.parametrize("count", [B, 2 * B + 3001])
def test_decoding_gives_the_definitions_bits(spot, k, norm, count):
    t = odd_weights(count)
    for profile in ("fast", "fix4"):
        packed = pack(t, mant_bits=k, block_norm=norm, profile=profile, raw="never", backend="reference")
        got = packed.to(spot.device).unpack(backend=spot.backend)
        assert same_bits(got, packed.unpack(backend="reference"))
        assert k != 7 or same_bits(got, t)
        packed.to(spot.device).verify(backend=spot.backend)
    raise_decode_errors(spot.device)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", PROFILES)
def test_every_pattern_is_decoded_in_every_profile(spot, profile):
    t = torch.cat([gaussian(4 * 2**16), every_pattern()[:2000]]) if profile == "dense" else every_pattern()
    if profile == "dense":
        t = t[-PROFILES["dense"].block - 1000 :]
    packed = pack(t, profile=profile, raw="never", backend="reference")
    assert same_bits(packed.to(spot.device).unpack(backend=spot.backend), t)


@compiled_or_interpreted
def test_a_stream_that_ends_elsewhere_is_found_when_one_asks_and_only_then(spot):
    packed = pack(gaussian(B), profile="fast", raw="never", backend="reference").to(spot.device)
    packed.sections[Section.LANE_UNITS][3] += 1
    packed.sections[Section.LANE_UNITS][4] -= 1
    packed.unpack(backend=spot.backend, check=False)
    raise_decode_errors(spot.device)
    packed.unpack(backend=spot.backend)
    with pytest.raises(StreamError, match="damaged"):
        raise_decode_errors(spot.device)
    raise_decode_errors(spot.device)


@compiled_or_interpreted
def test_verifying_on_the_device_finds_another_plane_and_another_stream(spot):
    packed = pack(gaussian(B + 8), profile="fast", raw="never", backend="reference").to(spot.device)
    packed.sections[Section.PLANE][B + 3] ^= 1
    with pytest.raises(BlockSumError):
        packed.verify(backend=spot.backend)
    packed.sections[Section.PLANE][B + 3] ^= 1
    packed.verify(backend=spot.backend)
    packed.sections[Section.LANE_UNITS][3] += 1
    packed.sections[Section.LANE_UNITS][4] -= 1
    with pytest.raises(StreamError):
        packed.verify(backend=spot.backend)


@compiled_or_interpreted
@lossy
@pytest.mark.parametrize("count", [B, 2 * B + 3001])
def test_encoding_gives_the_definitions_bytes(spot, k, norm, count):
    t = odd_weights(count, finite=k != 7)
    for profile in ("fast", "fix4"):
        options = {"mant_bits": k, "block_norm": norm, "profile": profile, "raw": "never"}
        right = pack(t, backend="reference", **options)
        assert pack(t.to(spot.device), backend=spot.backend, **options).to_bytes() == right.to_bytes()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter alone can be told an order")
@pytest.mark.parametrize("profile", ["fast", "default"])
def test_blocks_in_another_order_write_the_same_bytes_for_none_writes_those_of_another_triton(profile, monkeypatch):
    """A card runs them at once. The interpreter, which takes one after the other, is made to begin with the last: what
    is written behind a block's end would stay. What is written before its begin stays in the other tests."""
    from triton.runtime import interpreter

    builder, turned = interpreter.interpreter_builder, []
    forth = builder.set_grid_idx

    def back(x, y, z):
        turned.append(x)
        forth(builder.grid_dim[0] - 1 - x, y, z)

    t = odd_weights(5 * PROFILES[profile].block + 3001, finite=False)
    right = pack(t, profile=profile, raw="never", backend="reference")
    begins = right.sections[Section.BLOCK_DIR][:-1] % 2
    assert 0 < begins.sum() < len(begins), "blocks begin at the first and at the second half of 64 bits"
    monkeypatch.setattr(builder, "set_grid_idx", back)
    assert pack(t, profile=profile, raw="never", backend="triton").to_bytes() == right.to_bytes()
    assert max(turned) >= 5


@compiled_or_interpreted
@pytest.mark.parametrize("profile", PROFILES)
def test_every_pattern_is_encoded_in_every_profile(spot, profile):
    t = every_pattern() if profile != "dense" else torch.cat([gaussian(2**17), every_pattern()[:1000]])
    right = pack(t, profile=profile, raw="never", backend="reference")
    assert pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend).to_bytes() == right.to_bytes()


@compiled_or_interpreted
@pytest.mark.parametrize("lowest", [0, 120, 241])
def test_what_stands_beside_an_exponent_is_nothing_to_its_code_of_four_bits(spot, lowest):
    """Two are computed in one word. Every pair of those around the codes, and of the ends of all."""
    some = np.union1d(np.arange(max(0, lowest - 18), min(256, lowest + 33)), [0, 1, 127, 128, 254, 255])
    exponents = np.stack(np.meshgrid(some, some), 2).ravel()
    signs = np.random.default_rng(lowest).integers(0, 2**16, exponents.size) & 0x807F
    often = np.repeat(np.arange(lowest, lowest + 15) << 7, 300)  # beside about a hundred of every exponent
    t = patterns(np.concatenate([exponents << 7 | signs, often]).astype(np.uint16))
    packed = pack(t.to(spot.device), profile="fix4", raw="never", backend=spot.backend)
    assert packed.lowest == lowest and same_bits(packed.unpack(backend=spot.backend), t)
    known = (lowest <= exponents) & (exponents < lowest + 15)
    codes = np.where(known, exponents - lowest + 1, 0)
    found = packed.sections[Section.PAYLOAD].cpu().numpy().view(np.uint8)[: exponents.size // 2]
    assert (found == (codes[::2] | codes[1::2] << 4)).all()
    assert packed.header.patches == (~known).sum()


@compiled_or_interpreted
@pytest.mark.parametrize("count", [8, 1024, 1032, B - 8, B + 8, 2 * B - 1024, 1031])
def test_zeros_that_have_a_code_are_none_behind_the_last_weight(spot, count):
    """Where a lane has no weight, zeros are read, whose exponent is one of the coded ones here."""
    t = torch.zeros(count, dtype=torch.bfloat16)
    t[::5] = 1.5
    for profile in ("fast", "fix4"):
        right = pack(t, profile=profile, raw="never", backend="reference")
        assert (
            pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend).to_bytes() == right.to_bytes()
        )


@compiled_or_interpreted
@pytest.mark.parametrize("norm", [32, 128, 512, 1024])
def test_the_normalizers_of_the_published_program_are_the_definitions(spot, norm):
    t = odd_weights(5000, seed=norm)
    options = {"mant_bits": 3, "block_norm": norm, "norm_semantics": "authors_v1", "profile": "fast", "raw": "never"}
    right = pack(t, backend="reference", **options)
    assert pack(t.to(spot.device), backend=spot.backend, **options).to_bytes() == right.to_bytes()


@compiled_or_interpreted
@pytest.mark.parametrize("start", [0, 1, 8])
def test_a_view_that_begins_at_any_element_is_coded_and_decoded_into(spot, start):
    whole = gaussian(B + 16, device=spot.device)
    t = whole[start : start + B]
    packed = pack(t, profile="fast", raw="never", backend=spot.backend)
    room = torch.zeros(B + 16, dtype=torch.bfloat16, device=spot.device)
    packed.unpack(room[start : start + B], backend=spot.backend)
    assert same_bits(room[start : start + B], t) and not room[:start].any() and not room[start + B :].any()


LAST_FEW = [("fast", n) for n in (1, 7, 9, B - 1, B + 1, 2 * B + 5)]
LAST_FEW += [("fix4", n) for n in (1, 7, 9, 2 * B - 1, 2 * B + 3)] + [("default", 2 * B + 1029)]


@compiled_or_interpreted
@pytest.mark.parametrize(
    "profile,count,k,norm",
    [(*case, *kept) for case in LAST_FEW for kept in ((7, None), (3, 512))]
    + [("fast", B + 1, 1, None), ("fix4", 2 * B + 3, 0, 32), ("fast", 9, 0, 32), ("fix4", 9, 1, None)],
)
def test_the_last_few_weights_are_coded_and_decoded_beside_any_others(spot, profile, count, k, norm):
    """Those that do not fill eight are read and written by themselves, and nothing around them."""
    options = {"mant_bits": k, "block_norm": norm, "profile": profile, "raw": "never"}
    for start in (16, 17):
        whole = odd_weights(count + 40, seed=count, finite=k != 7)
        whole[start + count - 3 : start + count + 3] = 2.0**90  # of another size than nearly all: these are patched
        t = whole[start : start + count]
        right = pack(t, backend="reference", **options)
        packed = pack(whole.to(spot.device)[start : start + count], backend=spot.backend, **options)
        assert packed.to_bytes() == right.to_bytes()
        room = torch.full((count + 40,), 1.5, dtype=torch.bfloat16, device=spot.device)
        packed.unpack(room[start : start + count], backend=spot.backend)
        assert same_bits(room[start : start + count].cpu(), right.unpack(backend="reference"))
        assert (room[:start] == 1.5).all() and (room[start + count :] == 1.5).all()
    raise_decode_errors(spot.device)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 256, 257])
def test_as_many_patches_as_a_program_writes_at_once_and_one_more_come_back(spot, profile, count):
    """Fifteen exponents have codes, and none of `count` weights in one block has one of them."""
    rng = np.random.default_rng(count)
    bits = (100 + rng.geometric(0.4, 4 * B).clip(max=15)).astype(np.uint16) << 7 | rng.integers(
        0, 128, 4 * B, np.uint16
    )
    bits[:4500] = np.repeat(np.arange(101, 116, dtype=np.uint16) << 7, 300)  # each more often than what has no code
    bits[B + rng.permutation(B)[:count]] = 90 << 7 | 5
    t = patterns(bits)
    packed = pack(t.to(spot.device), profile=profile, backend=spot.backend)
    assert packed.header.patches == count and same_bits(packed.unpack(backend=spot.backend), t)


@compiled_or_interpreted
def test_an_update_with_an_old_codebook_gives_the_definitions_bytes(spot):
    t, changed = gaussian(2 * B), odd_weights(2 * B, seed=1, finite=False)
    changed[1000:] = gaussian(2 * B)[1000:]
    packed = pack(t.to(spot.device), profile="fast", backend=spot.backend)
    book = packed.book
    packed.update_(changed.to(spot.device), backend=spot.backend)
    right = pack(t, profile="fast", backend="reference").update_(changed, backend="reference")
    assert packed.book is book and packed.header.patches > 0
    assert packed.to_bytes() == right.to_bytes() and same_bits(packed.unpack(backend=spot.backend), changed)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_updates_that_were_begun_end_in_any_order_with_the_definitions_bytes(spot, profile):
    options = {"profile": profile, "raw": "never"}
    many = [pack(gaussian(2 * B).to(spot.device), backend=spot.backend, **options) for _ in range(4)]
    others = [odd_weights(B + 512, seed=n, finite=False) for n in range(4)]
    others = [torch.cat([gaussian(B - 512, n), t]) for n, t in enumerate(others)]
    before = many[0].to_bytes()
    ends = [one.update_later(t.to(spot.device), backend=spot.backend) for one, t in zip(many, others, strict=True)]
    assert many[3].to_bytes() == before
    for n in (3, 0, 2, 1):
        ends[n]()
        right = pack(gaussian(2 * B), backend="reference", **options).update_(others[n], backend="reference")
        assert many[n].to_bytes() == right.to_bytes()


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_packings_that_were_begun_share_nothing_and_keep_no_room_that_was_for_their_kernels(spot, profile):
    from paperlm_kernels.neuzip.launch_encode import _plan_of, begin_encode

    _plan_of.cache_clear()  # what an earlier one took is not expected
    many = [odd_weights(B + 3000, seed=n, finite=False) for n in range(3)]
    right = [pack(t, profile=profile, raw="never", backend="reference") for t in many]
    header = right[0].header.with_patches(0)
    ends = [begin_encode(t.to(spot.device), header, None) for t in many]
    packed = {n: Packed(*ends[n]()) for n in (2, 0, 1)}
    buffers = []
    for n, one in packed.items():
        assert one.to_bytes() == right[n].to_bytes()
        tables = [one.book.table(spot.device, which) for which in ("decoding", "packing", "index")] if one.book else []
        rest = [one.sections[section] for section in one.sections if section != Section.CODEBOOK]
        rooms = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in rest}
        # updates keep a codebook: it must not keep the other sections of the tensor that it was made of
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tables}
        assert not rooms.keys() & own.keys()
        assert sum(rooms.values()) + sum(own.values()) <= one.nbytes + 128  # and the note that was read back
        buffers += [*rooms, *own]
    assert len(buffers) == len(set(buffers))


@compiled_or_interpreted
@pytest.mark.parametrize("payload", ["random", "longest", "shortest"])
def test_a_payload_of_any_bits_leads_no_lane_out_of_the_buffers(spot, payload):
    """What lies around the buffers, and is not theirs, changes nothing in what is decoded."""
    packed = pack(gaussian(B + 999), profile="fast", raw="never", backend="reference")
    codes, guard = packed.book.codes, packed.header.geometry.guard
    words = packed.sections[Section.PAYLOAD].numpy().view(np.uint32)
    used = words[:-guard]
    pick = {"longest": codes[(codes >> 16).argmax()], "shortest": codes[(codes >> 16).argmin()]}
    if payload == "random":
        used[:] = np.random.default_rng(0).integers(0, 2**32, len(used))
    else:
        length = int(pick[payload] >> 16)
        code = format(int(pick[payload] & 0xFFFF), f"0{length}b")[::-1]
        stream = np.array(list((code * (32 * len(used) // length + 1))[: 32 * len(used)]), np.uint8)
        used[:] = np.packbits(stream, bitorder="little").view(np.uint32)
    packed = packed.to(spot.device)
    decoded = []
    for around in (0, 0x5A5A5A5A, -1):
        for section, tensor in packed.sections.items():
            if tensor.dtype == torch.int32:
                room = torch.full((tensor.numel() + 4096,), around, dtype=torch.int32, device=spot.device)
                room[2048 : 2048 + tensor.numel()] = tensor
                packed.sections[section] = room[2048 : 2048 + tensor.numel()]
        room = torch.full((B + 999 + 4096,), 1.5, dtype=torch.bfloat16, device=spot.device)
        packed.unpack(room[2048:-2048], backend=spot.backend, check=False)
        assert (room[:2048] == 1.5).all() and (room[-2048:] == 1.5).all()
        decoded.append(room[2048:-2048].clone())
    assert same_bits(decoded[0], decoded[1]) and same_bits(decoded[0], decoded[2])


def surrounded(packed: Packed, fill: int, device: torch.device) -> Packed:
    """Its sections amid memory that is not theirs, in which every byte is `fill`."""
    for section, tensor in packed.sections.items():
        data = tensor.cpu().contiguous().view(torch.uint8)
        room = torch.full((data.numel() + 16384,), fill, dtype=torch.uint8, device=device)
        room[8192 : 8192 + data.numel()] = data.to(device)
        packed.sections[section] = room[8192 : 8192 + data.numel()].view(tensor.dtype)
    return packed


def containers_of_three_blocks() -> list[bytes]:
    """Of codecs of which the fuzzer has one block: those with a directory of patches alone, and with normalizers."""
    weights = gaussian(20_000)
    weights[::100] *= 2.0**40
    lossy = {"profile": "fast", "mant_bits": 3, "block_norm": 512}
    options = ({"profile": "fix4"}, {"profile": "fix4", "mant_bits": 1}, lossy)
    return [pack(weights, raw="never", **chosen).to_bytes() for chosen in options]


@compiled_or_interpreted
def test_forged_containers_lead_no_kernel_out_of_their_buffers(spot):
    """Sealed damage of every kind of container, read without a look at a checksum; what is refused, is no kernel's."""
    rng, originals = np.random.default_rng(3), [*fuzz.samples(), *containers_of_three_blocks()]
    run = long = 0
    for number in range(9000):
        _, data = fuzz.mutated(originals[number % len(originals)], rng)
        try:
            packed = from_bytes(data, "none")
        except ContainerError:
            continue
        several = packed.header.numel > 5000  # which takes the interpreter longer: of these every second one
        if packed.header.codec == Codec.RAW or bytes(data) in originals or packed.header.numel > 25_000:
            continue
        if several and number % 2:
            continue
        run, long = run + 1, long + several
        decoded = []
        for fill in (0, 0xFF):
            one = surrounded(from_bytes(data, "none"), fill, spot.device)
            room = torch.full((packed.header.numel + 4096,), 1.5, dtype=torch.bfloat16, device=spot.device)
            target = room[2048 : 2048 + packed.header.numel].view(packed.shape)
            one.unpack(target, backend=spot.backend, check=False)
            assert (room[:2048] == 1.5).all() and (room[2048 + packed.header.numel :] == 1.5).all(), number
            decoded.append(target.clone().view(torch.int16))
        assert torch.equal(*decoded), f"mutation {number} reads what is not its own"
        if run >= 150 and long >= 10:
            return
    raise AssertionError("too few were accepted")


@compiled_or_interpreted
def test_an_update_of_four_bit_exponents_takes_others_for_its_codes(spot):
    t, other = gaussian(B), gaussian(B, seed=1, scale=2.0**40)
    packed = pack(t.to(spot.device), profile="fix4", raw="never", backend=spot.backend)
    packed.update_(other.to(spot.device), backend=spot.backend)
    assert same_bits(packed.unpack(backend=spot.backend), other)
    assert packed.to_bytes() == pack(other, profile="fix4", raw="never", backend="reference").to_bytes()


@compiled_or_interpreted
@pytest.mark.parametrize("seed", range(10))
def test_mixtures_of_any_length_and_scale_become_the_definitions_bytes_and_come_back(spot, seed):
    rng = np.random.default_rng(seed)
    count, profile = int(rng.integers(1, 20_000)), str(rng.choice(["fast", "default", "fix4"]))
    t = torch.from_numpy(rng.standard_normal(count) * 2.0 ** int(rng.integers(-120, 120))).bfloat16()
    odd = rng.random(count) < rng.random() * 0.1
    t = patterns(np.where(odd, rng.integers(0, 2**16, count), bits_of(t)).astype(np.uint16))
    packed = pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend)
    assert packed.to_bytes() == pack(t, profile=profile, raw="never", backend="reference").to_bytes()
    assert same_bits(packed.unpack(backend=spot.backend), t)
