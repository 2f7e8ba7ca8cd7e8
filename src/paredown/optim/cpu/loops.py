"""`update` and `fold` are loops that numba compiles, with the bits of `optim/reference.py`.

A row is read in tiles of whole blocks of every slot (weight, moments, gradient), at most TILE values. Rows of whole blocks are one row.

    tile:  read each slot -> rule -> find blocks that are not finite -> write each slot, those blocks excepted -> count

The functions of `codec/loops.py` find scales and codes; here are the rules, integers as `whole_parts` rounds them, sticky scales, roots,
residues and counters. Which layouts these loops cover is decided in `updater.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from paredown.codec import loops as codec
from paredown.codec.loops import FLOAT32, INF, TILE, ZERO, F, S, U, bits_of, entry, from_bits, inner
from paredown.optim import reference, rules

SGD, SGDM, NESTEROV, ADAMW, LION = range(5)
PACKED, ABSENT = -1, -2  # kinds of slots; the others are the dtypes of unpacked tensors
CODES, WHOLE = range(2)  # how integers are rounded
WEIGHT, GRADIENT = 0, 3  # indices of a parameter's tensors; between them are the moments
LIMIT, SMALLEST_SQUARE, LESS = F(reference.LIMIT), F(rules.SMALLEST_SQUARE), F(1 - 2.0**-22)
HALF_BITS, EXPONENT = S(rules.HALF_BITS), S(0x7F800000)
STAYS_ABOVE, SMALLEST_STICKY_CODE = reference.STAYS_ABOVE, reference.SMALLEST_STICKY_CODE
SAMPLED_BLOCKS, SAMPLED_EVERY = reference.SAMPLED_BLOCKS, reference.SAMPLED_EVERY
PLACE_1, PLACE_2, PLACE_3 = (U(factor) for factor in reference.PLACE_BITS[1:])


MEMORY = ("codes", "scales", "minimums")
TABLES = codec.Tables._fields
INTEGERS = (
    *("kind", "integers", "is_sticky", "roots"),
    "multiplier",  # factor of its random bits
    *(f"{name}_{what}" for name in (*MEMORY, *(f"table_{name}" for name in TABLES)) for what in ("address", "len")),
)
# how one tensor of a parameter is read and written
SLOT = np.dtype([*((name, np.int64) for name in INTEGERS), ("factor", np.float32)])


class EntrySlot(NamedTuple):
    """A weight, moment or gradient of one parameter: the memory and encoding that compiled loops read and write."""

    parts: Any
    numbers: Any
    tables: Any
    how: Any


class Shape(NamedTuple):
    """The sizes of an update (rows, columns, values in a tile and in a block), its first value's index, and `is_random`.

    A tile is the values that are decoded at once. `is_random`: whether any tensor is rounded stochastically.
    """

    rows: int
    cols: int
    tile: int
    block: int
    first_index: int
    is_random: bool


class Scales(NamedTuple):
    """Buffers for scales and minimums of the blocks of a tile, and for the codes of scales."""

    values: Any
    minimums: Any
    codes: Any


class Scratch(NamedTuple):
    """Buffers in which the values of one weight or moment are encoded, a tile (at most TILE values) at a time."""

    y: Any  # float32
    scaled: Any
    bits: Any  # uint32
    codes: Any
    old_codes: Any
    lost: Any  # uint8
    broken: Any
    ends: Any  # int32


# --- rules: `rules.py` ------------------------------------------------------------------------------------------------


@intrinsic
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32 values, rounded once: an operation that numba lacks, generated as LLVM code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@inner
def sgd(h, p, g, new_p):
    rate, decay = F(-h[1]), h[5]
    for i in range(len(p)):
        new_p[i] = fused(rate, fused(decay, p[i], g[i]), p[i])


@inner
def sgdm(h, p, g, m, new_p, new_m):
    rate, carry, fresh, decay = F(-h[1]), h[3], h[4], h[5]
    for i in range(len(p)):
        moment = fused(carry, m[i], F(fresh * fused(decay, p[i], g[i])))
        new_p[i], new_m[i] = fused(rate, moment, p[i]), moment


@inner
def nesterov(h, p, g, m, new_p, new_m):
    rate, momentum, carry, fresh, decay = F(-h[1]), h[2], h[3], h[4], h[5]
    for i in range(len(p)):
        d = fused(decay, p[i], g[i])
        moment = fused(carry, m[i], F(fresh * d))
        new_p[i], new_m[i] = fused(rate, fused(momentum, moment, d), p[i]), moment


@inner
def adamw(h, p, g, m, v, new_p, new_m, new_v):
    keep, beta1, rest1, beta2, rest2, step, inverse_root, eps = h[1], h[2], h[3], h[4], h[5], F(-h[6]), h[7], h[8]
    for i in range(len(p)):
        moment = fused(beta1, m[i], F(rest1 * g[i]))
        square = fused(beta2, v[i], fused(F(rest2 * g[i]), g[i], SMALLEST_SQUARE))
        inverse = F(F(1) / fused(inverse_root, F(np.sqrt(square)), eps))
        new_p[i] = fused(F(step * moment), inverse, F(p[i] * keep))
        new_m[i], new_v[i] = moment, square


@inner
def lion(h, p, g, m, new_p, new_m):
    keep, beta1, rest1, beta2, rest2, rate = h[1], h[2], h[3], h[4], h[5], F(-h[6])
    for i in range(len(p)):
        c = fused(beta1, m[i], F(rest1 * g[i]))
        sign = F(1) if c > ZERO else F(-1) if c < ZERO else ZERO
        new_p[i] = fused(rate, sign, F(p[i] * keep))
        new_m[i] = fused(beta2, m[i], F(rest2 * g[i]))


@inner
def apply_rule(rule, h, old, new, count):
    """Write the parameter and moments after an update into the rows of `new`, for the first `count` values of a tile.

    The rows of `old` are the parameter, two moments and the gradient. `rule` is a rule's number, `h` its hyperparameters.
    """
    p, m, v, g = old[0, :count], old[1, :count], old[2, :count], old[3, :count]
    new_p, new_m, new_v = new[0, :count], new[1, :count], new[2, :count]
    if rule == SGD:
        sgd(h, p, g, new_p)
    elif rule == SGDM:
        sgdm(h, p, g, m, new_p, new_m)
    elif rule == NESTEROV:
        nesterov(h, p, g, m, new_p, new_m)
    elif rule == ADAMW:
        adamw(h, p, g, m, v, new_p, new_m, new_v)
    else:
        lion(h, p, g, m, new_p, new_m)


@inner
def take_roots(x, roots, y):
    """Write x into y if `roots` is 0, its square root if it is 1, and about its fourth root if it is 2."""
    if roots == 0:
        for i in range(len(x)):
            y[i] = x[i]
        return
    for i in range(len(x)):
        y[i] = F(np.sqrt(x[i]))
    if roots == 2:
        bits = y.view(np.int32)
        for i in range(len(y)):
            half = S(S(bits[i] >> S(1)) + HALF_BITS)
            bits[i] = half if y[i] > ZERO else S(0)


@inner
def invert_roots(y, roots):
    """Replace each stored square root (`roots` = 1) or fourth root (2) of a second moment in `y` by that second moment."""
    if roots == 2:
        bits = y.view(np.int32)
        for i in range(len(y)):
            less = S(bits[i] - HALF_BITS)
            bits[i] = S((less if less > S(0) else S(0)) << S(1))
    for i in range(len(y)):
        y[i] = F(y[i] * y[i])


# --- memory ---------------------------------------------------------------------------------------------------------


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Return an address, an int64, as a pointer: an operation that numba lacks, generated as LLVM code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@inner
def parts_of(how):
    return codec.Parts(
        carray(pointer(how.codes_address), how.codes_len, np.uint8),
        carray(pointer(how.scales_address), how.scales_len, np.uint8),
        carray(pointer(how.minimums_address), how.minimums_len, np.uint8),
    )


@inner
def tables_of(how):
    return codec.Tables(
        carray(pointer(how.table_values_address), how.table_values_len, np.float32),
        carray(pointer(how.table_scales_address), how.table_scales_len, np.float32),
        carray(pointer(how.table_thresholds_address), how.table_thresholds_len, np.float32),
        carray(pointer(how.table_signs_address), how.table_signs_len, np.uint32),
    )


# --- reading ----------------------------------------------------------------------------------------------------------


@inner
def blocks_of(n, row, cols, begin, count):
    """Return a tile's first block within its row, its number of blocks, and that first block's index in the whole tensor.

    The tile has `count` values of row `row`, from column `begin` on; all three are 0 if the format, described by `n`, has no blocks.
    """
    if n.block == 0:
        return 0, 0, 0
    first = begin // n.block
    return first, (begin + count - 1) // n.block + 1 - first, row * ((cols - 1) // n.block + 1) + first


@inner
def bytes_of(parts, n, row, cols, begin, count):
    """Return a view of the bytes that hold the codes of a tile: `count` values of row `row`, from column `begin` on."""
    first = row * ((cols * n.width + 7) // 8) + begin * n.width // 8
    return parts.codes[first : first + (count * n.width + 7) // 8]


@inner
def read(slot, row, cols, begin, y, codes, scales):
    """Decode a tile of one tensor, len(y) values of row `row` from column `begin` on, into `y` as float32.

    Values are multiplied by the factor of `slot`. `codes` and `scales` are buffers that then hold the tile's codes and scales.
    """
    n, count, factor = slot.numbers, len(y), slot.how.factor
    first, blocks, start = blocks_of(n, row, cols, begin, count)
    if slot.how.kind == PACKED:
        codec.unpack(bytes_of(slot.parts, n, row, cols, begin, count), n.width, codes)
        codec.values_of(codes, y, n, slot.tables.values)
    else:
        codec.load(slot.parts.codes, slot.how.kind, row * cols + begin, y)
    if blocks:
        values, minimums = scales.values[:blocks], scales.minimums[:blocks]
        codec.read_scales(slot.parts, start, F(1), n, slot.tables.scales, scales.codes[:blocks], values, minimums)
        for b in range(blocks):
            values[b], minimums[b] = F(values[b] * factor), F(minimums[b] * factor)
        codec.multiply_by_scales(y, begin, first, n, values, minimums)
    else:
        for i in range(count):
            y[i] = F(y[i] * factor)
    if slot.how.roots:
        invert_roots(y, slot.how.roots)


@inner
def read_residue(weight, residue, place, y):
    """Write len(y) weights from index `place` on into `y`; each consists of a bfloat16 number and 8 more bits, its residue."""
    words, low, bits = weight.view(np.int16), residue.view(np.int8), y.view(np.int32)
    for i in range(len(y)):
        bits[i] = S(S(S(words[place + i]) << S(16)) + S(S(low[place + i]) << S(8)))


# --- writing ----------------------------------------------------------------------------------------------------------


@inner
def draw_bits(bits, quads, call, index, count):
    """Return the random bits of `count` weights from `index` on; four adjacent weights share one hash.

    `bits` (for the result) and `quads` (for the hashes) are buffers; `call` has the keys.
    """
    first, offset = index >> 2, index & 3
    part = quads[: (offset + count + 3) >> 2]
    codec.fill_bits(part, call, first)
    for j in range(len(part)):
        word, i = part[j], 4 * j
        bits[i], bits[i + 1] = word, U(word * PLACE_1)
        bits[i + 2], bits[i + 3] = U(word * PLACE_2), U(word * PLACE_3)
    return bits[offset : offset + count]


@inner
def whole_codes(y, bits, codes, begin, first_block, n, scales):
    """Write the codes of y / scale for an integer element, rounded by means of `bits` as `reference.whole_parts` defines.

    `y` begins at column `begin` of its row; `scales` are those of its blocks, from the row's block `first_block` on.
    """
    mask, is_stochastic, is_signed = S((1 << n.width) - 1), n.rounding == codec.STOCHASTIC, n.min_value < ZERO
    for b in range(begin // n.block, (begin + len(y) - 1) // n.block + 1):
        start, stop = codec.place_of(b, n.block, begin, len(y))
        inverse = F(F(1) / scales[b - first_block])
        inverse = inverse if inverse < INF else ZERO
        inverse = np.float64(F(inverse * LESS) if is_stochastic and n.scale != codec.CODE else inverse)
        if is_stochastic:
            for i in range(start, stop):
                v = y[i] if is_signed or y[i] > ZERO else ZERO
                x = np.float64(v) * inverse
                whole = np.floor(x)
                threshold = np.float64(1) - np.float64(S(bits[i] >> U(9))) * np.float64(2.0**-23)
                codes[i] = U(S(S(whole) + S(x - whole >= threshold)) & mask)
        else:
            for i in range(start, stop):
                v = y[i] if is_signed or y[i] > ZERO else ZERO
                codes[i] = U(S(np.rint(np.float64(v) * inverse)) & mask)


@inner
def sticky_scales(top, n, scale_values, old, scales):
    """Write the e8m0 scales of a weight's blocks after an update: the `old` scale as long as it fits the largest value.

    `top` has each block's largest magnitude as float32 bits, `scale_values` the value of each code of a scale.
    """
    least = F(STAYS_ABOVE * np.float64(n.max_value))
    for b in range(len(top)):
        largest = from_bits(top[b])
        cover, before = n.scale_nan, np.int64(old.codes[b])
        if largest == largest:
            cover = max(codec.scale_code(F(largest / n.max_value), n), SMALLEST_STICKY_CODE)
        stays = largest == ZERO or (cover <= before and largest >= F(least * old.values[b]))
        scales.codes[b] = np.uint8(before if stays else cover)
        scales.values[b] = scale_values[scales.codes[b]]


@inner
def encode_blocks(slot, y, begin, first, blocks, old, scales, made, bits, codes):
    """Encode `y`, the new values of a tile in a format with blocks, into the buffers `scales` and `codes`.

    `first` is the tile's first block in its row, `blocks` their number; `old` are a weight's scales before, `made` other buffers.
    """
    n, count = slot.numbers, len(y)
    top, low, high = made.ends[0, :blocks], made.ends[1, :blocks], made.ends[2, :blocks]
    codec.find_ends(y, begin, first, n, top, low, high)
    values, minimums, scale_codes = scales.values[:blocks], scales.minimums[:blocks], scales.codes[:blocks]
    minimums[:] = ZERO  # instead of what another slot left there
    if slot.how.is_sticky:
        sticky_scales(top, n, slot.tables.scales, old, scales)
    else:
        codec.choose_scales(top, low, high, F(1), n, slot.tables.scales, scale_codes, values, minimums)
    if slot.how.integers == WHOLE:
        whole_codes(y, bits, codes, begin, first, n, values)
        return
    broken, lost, scaled = made.broken[:blocks], made.lost[:count], made.scaled[:count]
    codec.codes_in_blocks(y, scaled, bits, codes, lost, begin, first, n, slot.tables, top, broken, scale_codes, values, minimums)


@inner
def write(slot, row, cols, begin, x, bits, skipped, old, scales, made):
    """Encode `x`, the new values of a tile, and store codes and scales, except for the values that the mask `skipped` marks.

    An empty mask marks none. `bits` are random, `old` a weight's scales before the update, `scales` and `made` buffers.
    """
    n, count = slot.numbers, len(x)
    y, codes, old_codes, random = made.y[:count], made.codes[:count], made.old_codes[:count], made.bits[:count]
    first, blocks, start = blocks_of(n, row, cols, begin, count)
    target = bytes_of(slot.parts, n, row, cols, begin, count)
    take_roots(x, slot.how.roots, y)
    if slot.how.kind == FLOAT32:
        new, floats = y.view(np.uint32), target.view(np.uint32)
        for i in range(count):
            floats[i] = floats[i] if len(skipped) and skipped[i] else new[i]
        return
    if n.rounding == codec.STOCHASTIC:
        multiplier = U(slot.how.multiplier)
        for i in range(count):
            random[i] = U(bits[i] * multiplier)
    else:
        random[:] = U(1 << 31) if n.rounding == codec.NEAREST_AWAY else U(0)
    if blocks:
        encode_blocks(slot, y, begin, first, blocks, old, scales, made, random, codes)
    else:
        codec.codes_of(y, random, codes, made.lost[:count], n, slot.tables)
    if slot.how.roots and slot.how.kind == PACKED:
        for i in range(count):
            codes[i] = max(codes[i], U(1))
    if len(skipped):
        codec.unpack(target, n.width, old_codes)
        for i in range(count):
            codes[i] = old_codes[i] if skipped[i] else codes[i]
    codec.pack(codes, n.width, target)
    if blocks:
        store_scales(slot, begin, first, blocks, start, skipped, scales)


@inner
def store_scales(slot, begin, first, blocks, start, skipped, scales):
    """Store the new scales and minimums of a tile's blocks, except for blocks that the mask `skipped` marks.

    `first` is the tile's first block in its row, `start` its index in the tensor; an empty mask marks no block.
    """
    n, values, minimums, codes = slot.numbers, scales.values, scales.minimums, scales.codes
    if not len(skipped):
        codec.write_scales(slot.parts, start, n, codes[:blocks], values[:blocks], minimums[:blocks])
        return
    for b in range(blocks):
        if not skipped[(first + b) * n.block - begin]:
            codec.write_scales(slot.parts, start + b, n, codes[b : b + 1], values[b : b + 1], minimums[b : b + 1])


@inner
def write_residue(weight, residue, place, x, skipped):
    words, low, bits = weight.view(np.int16), residue.view(np.int8), x.view(np.int32)
    for i in range(len(x)):
        if not (len(skipped) and skipped[i]):
            all_bits = S(S(bits[i] + S(128)) >> S(8))
            high = S(S(all_bits + S(128)) >> S(8))
            words[place + i], low[place + i] = np.int16(high), np.int8(S(all_bits - S(high << S(8))))


# --- what is not finite, and counters ---------------------------------------------------------------------------------


@inner
def find_not_finite(slots, new, count, lost):
    """Mark in `lost` the values of a tile whose new weight or moment is not finite or too large; return their number."""
    num = 0
    for i in range(count):
        lost[i] = np.uint8(not abs(new[0, i]) < LIMIT)
    for k in range(1, GRADIENT):
        if slots[k].how.kind != ABSENT:
            limit = INF if slots[k].how.roots else LIMIT
            for i in range(count):
                lost[i] |= np.uint8(not abs(new[k, i]) < limit)
    for i in range(count):
        num += lost[i]
    return num


@inner
def skip_blocks(begin, block, old, new, count, lost, skipped):
    """Mark in `skipped` all values of the blocks that have a value marked in `lost`; return how many such blocks there are.

    In `new` the weights of these blocks become the `old` ones, and their moments 0, so that nothing infinite is encoded.
    """
    num = 0
    for b in range(begin // block, (begin + count - 1) // block + 1):
        start, stop = codec.place_of(b, block, begin, count)
        is_broken = False
        for i in range(start, stop):
            is_broken |= lost[i] > 0
        num += is_broken
        for i in range(start, stop):
            skipped[i] = is_broken
            if is_broken:
                new[0, i], new[1, i], new[2, i] = old[0, i], ZERO, ZERO
    return num


@inner
def half_step(p, scale, min_exponent, mantissa_bits):
    """Return half the distance between neighbouring values of a format at the weight `p`; `scale` is its block's, or 1."""
    inverse = F(F(1) / scale)
    y = F(p * (inverse if inverse < INF else ZERO))
    least = S(S(min_exponent + 127) << S(23))
    binade = S(S(bits_of(y)) & EXPONENT)
    return F(F(from_bits(binade if binade > least else least) * F(2.0 ** -(mantissa_bits + 1))) * scale)


@inner
def count_changes(n, mantissa_bits, begin, first_number, block, p, new_p, stored, old, skipped, counters):
    """Count for diagnostics how many weights of a tile's sampled blocks changed, before and after rounding.

    `p` are the old weights, `new_p` the new ones before rounding, `stored` after it; `counters` are described in `reference.py`.
    """
    first = begin // n.block if n.block else 0
    for b in range(begin // block, (begin + len(p) - 1) // block + 1):
        start, stop = codec.place_of(b, block, begin, len(p))
        number = first_number + b
        if number // SAMPLED_BLOCKS % SAMPLED_EVERY or (len(skipped) and skipped[start]):
            continue
        counters[0] += np.int32(stop - start)
        for i in range(start, stop):
            if new_p[i] != p[i]:
                scale = old.values[(begin + np.int64(i)) // n.block - first] if n.block else F(1)
                counters[1] += np.int32(1)
                counters[2] += np.int32(stored[i] != p[i])
                counters[3] += np.int32(abs(F(new_p[i] - p[i])) < half_step(p[i], scale, n.min_exponent, mantissa_bits))


@inner
def has_sampled(first_number, last_number):
    """Return whether any block with a number from `first_number` to `last_number` is sampled for diagnostics."""
    every = SAMPLED_BLOCKS * SAMPLED_EVERY
    return first_number % every < SAMPLED_BLOCKS or first_number // every != last_number // every


# --- one parameter ----------------------------------------------------------------------------------------------------


@inner
def new_scratch():
    return Scratch(
        np.empty(TILE, np.float32),
        np.empty(TILE, np.float32),
        np.empty(TILE, np.uint32),
        np.empty(TILE, np.uint32),
        np.empty(TILE, np.uint32),
        np.empty(TILE, np.uint8),
        np.empty(TILE + 1, np.uint8),
        np.empty((3, TILE + 1), np.int32),
    )


def _entries(codec_version: int) -> tuple[Any, Any]:
    """Return `update` and `fold`, the two functions that callers use, as functions that numba compiles.

    numba keeps compiled code on disk. Its key is the source of this file and `codec_version`, a checksum of `codec/loops.py`'s source.
    """

    def update(numbers, records, residue, shape, k0, k1, rule, h, counters):
        """Update one parameter and its state in place, tile by tile: read, apply the rule, encode, store, and count changes.

        `numbers` and `records` describe weight, two moments and gradient; `residue` may be empty; k0 and k1 are keys of the random bits.
        """
        assert codec_version >= 0
        slots = (
            EntrySlot(parts_of(records[0]), numbers[0], tables_of(records[0]), records[0]),
            EntrySlot(parts_of(records[1]), numbers[1], tables_of(records[1]), records[1]),
            EntrySlot(parts_of(records[2]), numbers[2], tables_of(records[2]), records[2]),
            EntrySlot(parts_of(records[3]), numbers[3], tables_of(records[3]), records[3]),
        )
        cols, block, call = shape.cols, shape.block, codec.Call(1, 1, FLOAT32, F(1), k0, k1, 0)
        old, new, stored = np.empty((4, TILE), np.float32), np.zeros((3, TILE), np.float32), np.empty(TILE, np.float32)
        bits, quads = np.zeros(TILE + 8, np.uint32), np.empty(TILE // 4 + 2, np.uint32)
        codes, skipped_values, nothing = np.empty(TILE, np.uint32), np.empty(TILE, np.uint8), np.empty(0, np.uint8)
        floats, scale_codes = np.zeros((4, TILE + 1), np.float32), np.zeros((2, TILE + 1), np.uint8)
        before = Scales(floats[0], floats[1], scale_codes[0])  # of the weight
        scales = Scales(floats[2], floats[3], scale_codes[1])
        made = new_scratch()
        weight, blocks_per_row = slots[WEIGHT], (cols - 1) // block + 1
        for row in range(shape.rows):
            for begin in range(0, cols, shape.tile):
                count, place = min(shape.tile, cols - begin), row * cols + begin
                for k in range(4):
                    if slots[k].how.kind != ABSENT:
                        read(slots[k], row, cols, begin, old[k, :count], codes[:count], before if k == WEIGHT else scales)
                if len(residue):
                    read_residue(weight.parts.codes, residue, place, old[0, :count])
                apply_rule(rule, h, old, new, count)
                skipped = nothing
                if find_not_finite(slots, new, count, made.lost):
                    skipped = skipped_values[:count]
                    counters[4] += np.int32(skip_blocks(begin, block, old, new, count, made.lost, skipped))
                drawn = draw_bits(bits, quads, call, shape.first_index + place, count) if shape.is_random else bits[:count]
                for k in range(GRADIENT):
                    if k == WEIGHT and len(residue):
                        write_residue(weight.parts.codes, residue, place, new[0, :count], skipped)
                    elif slots[k].how.kind != ABSENT:
                        write(slots[k], row, cols, begin, new[k, :count], drawn, skipped, before, scales, made)
                first_number = row * blocks_per_row
                if has_sampled(first_number + begin // block, first_number + (begin + count - 1) // block):
                    t = stored[:count]
                    read(weight, row, cols, begin, t, codes[:count], scales)
                    if len(residue):
                        read_residue(weight.parts.codes, residue, place, t)
                    p, new_p = old[0, :count], new[0, :count]
                    mantissa_bits = 15 if len(residue) else weight.numbers.mantissa_bits
                    count_changes(weight.numbers, mantissa_bits, begin, first_number, block, p, new_p, t, before, skipped, counters)

    def fold(numbers, records, shape, k0, k1, grad, dtype, weight, is_first):
        """Add the gradient in the memory `grad`, times `weight`, to a packed sum; if `is_first`, replace the sum by it."""
        assert codec_version >= 0
        slot = EntrySlot(parts_of(records[0]), numbers[0], tables_of(records[0]), records[0])
        cols, call = shape.cols, codec.Call(1, 1, FLOAT32, F(1), k0, k1, shape.first_index)
        total, y, bits = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros(TILE, np.uint32)
        codes, nothing, made = np.empty(TILE, np.uint32), np.empty(0, np.uint8), new_scratch()
        scales = Scales(np.zeros(TILE + 1, np.float32), np.zeros(TILE + 1, np.float32), np.zeros(TILE + 1, np.uint8))
        for row in range(shape.rows):
            for begin in range(0, cols, shape.tile):
                count, place = min(shape.tile, cols - begin), row * cols + begin
                t = y[:count]
                codec.load(grad, dtype, place, t)
                for i in range(count):
                    t[i] = F(t[i] * weight)
                if not is_first:
                    read(slot, row, cols, begin, total[:count], codes[:count], scales)
                    for i in range(count):
                        t[i] = F(total[i] + t[i])
                if shape.is_random:
                    codec.fill_bits(bits[:count], call, place)
                write(slot, row, cols, begin, t, bits[:count], nothing, scales, scales, made)

    return entry(update), entry(fold)


update, fold = _entries(crc32(Path(codec.__file__).read_bytes()))
