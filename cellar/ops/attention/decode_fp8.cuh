// K and V of decodes as e4m3 codes with a power of two for each row (`decode.cu`, `ops/kv_format.py`): of a chunk and
// head CHUNK rows of DIM codes, then CHUNK exponents b, numbers being code x 2^(b - 127).
//
// Codes become float16, which has all of them, in registers, two an instruction; products are of float16. Exponents of
// keys go to the scores, those of values to the weights (`refer`).
//
// What a lane has of codes is four at a time, so dimensions stand in the products in another order. Of keys a word is
// dimensions 4 c to 4 c + 3 of 16 (c = lane % 4): products take two of them as 2 c and 2 c + 1, two as 2 c + 8 and
// 2 c + 9. Of values the turning load takes two neighbours of a row for one 16-bit number: a word is dimensions 2 g and
// 2 g + 1 (g = lane / 4) of tokens 2 c and 2 c + 1, and those dimensions are rows g and g + 8 of the product.

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
    const u32 powers = stages + STAGES * STAGE_BYTES + stage * SCALES + part * OWN + lane / 4;
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
    refer(sums, top, power);
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
