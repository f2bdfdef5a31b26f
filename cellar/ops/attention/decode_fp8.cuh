// K and V of decodes as e4m3 codes with a power of two for each row (`decode.cu`, `ops/kv_format.py`): of a chunk and
// head CHUNK rows of DIM codes, then CHUNK exponents b, numbers being code x 2^(b - 127).
//
// Codes become float16, which has all of them, in registers, two an instruction; products are of float16. The queries
// come in float16, too, each row times a power of two that makes it large, so that no bit of a number is lost. Exponents
// of keys go to the scores. Those of values go to the weights, relative to a reference that a warp takes from the first
// tokens it sees of an item, and moves where one exceeds it by more than 2^NEAR: weights stay in the range of float16.
//
// What a lane has of codes is four at a time, so dimensions stand in the products in another order. Of keys a word is
// dimensions 4 c to 4 c + 3 of 16 (c = lane % 4): products take two of them as 2 c and 2 c + 1, two as 2 c + 8 and
// 2 c + 9. Of values the turning load takes two neighbours of a row for one 16-bit number: a word is dimensions 2 g and
// 2 g + 1 (g = lane / 4) of tokens 2 c and 2 c + 1, and those dimensions are rows g and g + 8 of the product.

constexpr u32 KEY_BYTES = TURN * DIM;            // of a stage; as many of values behind them
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES, POWERS = 2 * TURN;  // exponents stand behind all stages' codes
constexpr u32 ALL_STAGES = STAGES * (STAGE_BYTES + POWERS);
constexpr u32 CHUNK_BYTES = CHUNK * DIM;
constexpr int UNITS = DIM / 16;                  // of a row: 16 bytes, the columns of a product
constexpr int EACH = DIM / 32;                   // dimensions that a lane has of a row in turn
constexpr int NEAR = 4;

static_assert(DIM <= 128 && PER_TURN * 4 <= 32 && CHUNK_BYTES % 1024 == 0);

// Where the copy engine puts a byte: blocks of 16 of a line of 128 are exchanged by the line's number.
__device__ __forceinline__ u32 swizzled(u32 place) { return place ^ (place >> 3 & 0x70); }

// A stage's chunks: slots of 32 chunks are known, one a lane; `here` of them from the lane `ahead` on.
__device__ __forceinline__ void load_turn(const TensorMap* keys, const TensorMap* values, const Arguments& a, u32 stages,
                                          u32 stage, u32 full, int head, int known, int ahead, int here, int lane) {
    if (lane == 0) barrier_expect(full, here * 2 * (CHUNK_BYTES + CHUNK));
    __syncwarp();
    const int which = lane / 4, of_values = lane / 2 % 2;
    const int slot = __shfl_sync(~0u, known, (ahead + which) % 32);
    if (which >= here) return;
    if (lane % 2 == 0) {
        const u32 to = stages + stage * STAGE_BYTES + of_values * KEY_BYTES + which * CHUNK_BYTES;
        load_box(of_values ? values : keys, to, full, 0, 0, 0, head, slot);
    } else {
        const Stored* of = of_values ? a.v_cache + slot * a.v_slot : a.k_cache + slot * a.k_slot;
        const u32 to = stages + STAGES * STAGE_BYTES + stage * POWERS + of_values * TURN + which * CHUNK;
        load_bytes(to, of + head * a.cache_head + CHUNK_BYTES, CHUNK, full);
    }
}

struct Queries {
    u32 pairs[UNITS][2];  // dimensions 16 u + 4 (lane % 4) to the third from there, of query lane / 4
    float factor[2];      // of the products with queries 2 (lane % 4) and the next
};

__device__ __forceinline__ Queries queries_of(const Arguments&, const Shared& shared, int lane) {
    Queries q;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const u16* row = &shared.queries[lane / 4][16 * u + lane % 4 * 4];
        q.pairs[u][0] = *reinterpret_cast<const u32*>(row);
        q.pairs[u][1] = *reinterpret_cast<const u32*>(row + 2);
    }
    for (int i = 0; i < 2; ++i) {
        const int query = lane % 4 * 2 + i;
        q.factor[i] = query < GROUP ? shared.factors[query] : 0.0f;
    }
    return q;
}

struct Sums {
    float weighted[UNITS][4];  // O^T: dimension 16 u + 2 (lane / 4), queries 2 (lane % 4) and the next; the next dimension
    float phi[2], total[2];    // of these two queries
    int power;                 // the sums are in units of 2^(power - 127)
    bool none;
};

// The bits of the largest absolute value of a row.
__device__ __forceinline__ u32 largest_bits(const float (&x)[EACH]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u32 bits = __float_as_uint(x[i]) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    return most_in_warp(most);
}

__device__ __forceinline__ float power_at(int exponent) { return __uint_as_float(static_cast<u32>(exponent) << 23); }

// A new row of K or V, in a warp: codes and exponent to the cache, the numbers that they mean to `numbers`.
__device__ __forceinline__ void keep(const float (&x)[EACH], Stored* codes, Stored* exponent, float* numbers, int lane) {
    const u32 most = largest_bits(x);
    // 448 is 1.75 x 2^8: the exponent, less 8, one more beyond 1.75.
    int power = static_cast<int>(most >> 23) - 8 + ((most & 0x7FFFFF) > 0x600000);
    power = most >= 0x7F800000 ? 255 : power < 1 ? 1 : power;
    const float inverse = power_at(power < 254 ? 254 - power : 0), unit = power_at(power);
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        const u32 pair = two_codes(x[i] * inverse, x[i + 1] * inverse), halves = halves_below(pair);
        *reinterpret_cast<u16*>(codes + lane * EACH + i) = static_cast<u16>(pair);
        numbers[lane * EACH + i] = of_half(halves & 0xFFFF) * unit;
        numbers[lane * EACH + i + 1] = of_half(halves >> 16) * unit;
    }
    if (lane == 0) *exponent = static_cast<Stored>(power);
}

// The queries with their embedding, and K and V of the newest position, which are written to the cache, too. A row is a
// warp's.
__device__ __forceinline__ void prepare(const Arguments& a, const Item& item, Shared& shared, int thread) {
    const int warp = thread / 32, lane = thread % 32, head = item.head;
    const int rows = GROUP + (item.newest ? 2 : 0);
    for (int row = warp; row < rows; row += WARPS) {
        const u16* from = a.q + item.token * a.q_token + (head * GROUP + row) * a.q_head;
        if (row == GROUP) from = a.k + item.token * a.k_token + head * a.k_head;
        if (row == GROUP + 1) from = a.v + item.token * a.v_token + head * a.v_head;
        const int turning = row == GROUP + 1 ? 0 : a.rotary_dim;
        float x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            x[i] = one(narrow(rotated(from, a.cos_sin, turning, item.start, lane * EACH + i)));
        }
        if (row >= GROUP) {
            const long long slot = a.table[item.row * a.table_row + item.start / CHUNK];
            const int place = item.start % CHUNK;
            Stored* piece = row == GROUP ? a.k_cache + slot * a.k_slot : a.v_cache + slot * a.v_slot;
            piece += head * a.cache_head;
            keep(x, piece + place * DIM, piece + CHUNK_BYTES + place, row == GROUP ? shared.new_key : shared.new_value, lane);
            continue;
        }
        // The largest comes to 2^14 or more, but less than 2^15.
        const int found = static_cast<int>(largest_bits(x) >> 23), up = found > 15 ? 268 - found : 253;
        const float larger = power_at(up);
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            *reinterpret_cast<u32*>(&shared.queries[row][lane * EACH + i]) = two_halves(x[i] * larger, x[i + 1] * larger);
        }
        if (lane == 0) shared.factors[row] = a.scale * power_at(254 - up);
    }
}

__device__ __forceinline__ void score_newest(const Arguments&, Shared& shared, int warp, int lane) {
    for (int g = warp; g < GROUP; g += WARPS) {
        float sum = 0.0f;
        for (int d = lane; d < DIM; d += 32) sum += of_half(shared.queries[g][d]) * shared.new_key[d];
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) shared.new_score[g] = sum * shared.factors[g];
    }
}

// Zeros instead of values that nobody has written: 0 times NaN is NaN.
__device__ __forceinline__ void clear_values(u32 values, int first, int from, int lane) {
    for (int i = lane; i < (OWN - from) * UNITS; i += 32) {
        clear_shared(values + swizzled((first + from + i / UNITS) * DIM + i % UNITS * 16));
    }
    // The copy engine writes there next.
    stores_before_copies();
    __syncwarp();
}

// A warp's OWN tokens of a stage, of which [low, high) count.
__device__ __forceinline__ void add_own(Sums& sums, const Queries& q, u32 stages, u32 stage, int part, int low, int high,
                                        int lane) {
    const u32 keys = stages + stage * STAGE_BYTES, values = keys + KEY_BYTES;
    const u32 powers = stages + STAGES * STAGE_BYTES + stage * POWERS + part * OWN + lane / 4;
    if (high < OWN) clear_values(values, part * OWN, high, lane);
    // Rows of the four matrices that are loaded at once: 16 tokens' two units. Further units differ in bits that are 0.
    const u32 place = swizzled((part * OWN + lane / 8 % 2 * 8 + lane % 8) * DIM + lane / 16 * 16);
    u32 k[TILES][UNITS / 2][4], v[TILES][UNITS / 2][4];
    int key_power[TILES][2], value_power[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int u = 0; u < UNITS / 2; ++u) load_matrices(k[t][u], keys + t * 16 * DIM + (place ^ u * 32));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            key_power[t][i] = load_byte(powers + t * 16 + i * 8);
            value_power[t][i] = load_byte(powers + TURN + t * 16 + i * 8);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int u = 0; u < UNITS / 2; ++u) load_matrices_turned(v[t][u], values + t * 16 * DIM + (place ^ u * 32));
    }
    float s[TILES][2][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const u32 upper = k[t][u / 2][u % 2 * 2], lower = k[t][u / 2][u % 2 * 2 + 1];
            const u32 a[4] = {halves_below(upper), halves_below(lower), halves_above(upper), halves_above(lower)};
            multiply_halves(s[t][u % 2], a, q.pairs[u][0], q.pairs[u][1]);
        }
    }
    const int mine = lane / 4;
    float score[TILES][4], top[2] = {LOWEST, LOWEST};
    int power = 0;
    bool counts[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = mine + t * 16 + half * 8;
            counts[t][half] = token >= low && token < high;
            const float unit = power_at(key_power[t][half]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float sum = (s[t][0][half * 2 + i] + s[t][1][half * 2 + i]) * unit;
                score[t][half * 2 + i] = counts[t][half] ? sum * q.factor[i] : LOWEST;
                top[i] = fmaxf(top[i], score[t][half * 2 + i]);
            }
            if (counts[t][half] && value_power[t][half] > power) power = value_power[t][half];
        }
    }
    const bool far = top[0] > sums.phi[0] + FAR || top[1] > sums.phi[1] + FAR || power > sums.power + NEAR;
    if (sums.none || __any_sync(~0u, far)) {
        const int most = static_cast<int>(most_in_warp(power)), reference = most > sums.power ? most : sums.power;
        const float smaller = power_of_2(static_cast<float>(sums.power - reference));
        sums.power = reference;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float phi = fmaxf(sums.phi[i], over_rows(top[i])), shrink = power_of_2(sums.phi[i] - phi);
            sums.phi[i] = phi;
            sums.total[i] *= shrink;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                sums.weighted[u][i] *= shrink * smaller;
                sums.weighted[u][i + 2] *= shrink * smaller;
            }
        }
        sums.none = false;
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        float weight[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int apart = value_power[t][half] - sums.power + 127;
            const float unit = power_at(apart > 0 ? apart : 0);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Not by the score: a NaN of what nobody has written stays out.
                const float one = counts[t][half] ? power_of_2(score[t][half * 2 + i] - sums.phi[i]) : 0.0f;
                sums.total[i] += one;
                weight[half * 2 + i] = counts[t][half] ? one * unit : 0.0f;
            }
        }
        const u32 b0 = turned(two_halves(weight[0], weight[1])), b1 = turned(two_halves(weight[2], weight[3]));
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            // Of both tokens the first dimension, then the second.
            const u32 first = __byte_perm(v[t][u / 2][u % 2 * 2], 0, 0x3120);
            const u32 second = __byte_perm(v[t][u / 2][u % 2 * 2 + 1], 0, 0x3120);
            const u32 a[4] = {halves_below(first), halves_above(first), halves_below(second), halves_above(second)};
            multiply_halves(sums.weighted[u], a, b0, b1);
        }
    }
}

__device__ __forceinline__ void put(Sums& sums, Shared& shared, int warp, int lane) {
    const float unit = power_at(sums.power);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = lane % 4 * 2 + i;
        for (int distance = 4; distance < 32; distance *= 2) {
            sums.total[i] += __shfl_xor_sync(~0u, sums.total[i], distance);
        }
        if (query >= GROUP) continue;
        if (lane < 4) shared.tops[warp][query] = sums.phi[i], shared.totals[warp][query] = sums.total[i];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            shared.sums[warp][query][16 * u + lane / 4 * 2] = sums.weighted[u][i] * unit;
            shared.sums[warp][query][16 * u + lane / 4 * 2 + 1] = sums.weighted[u][i + 2] * unit;
        }
    }
}
