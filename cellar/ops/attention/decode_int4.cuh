// K and V of decodes as codes of four bits, with a scale and a least number for each half of a row (`decode.cu`,
// `ops/kv_format.py`): byte i of a row has dimension i and, above it, dimension DIM / 2 + i; behind the chunk's codes
// stand 8 bytes a row, of bfloat16: scale and least of the lower half, then of the upper one.
//
// A number is scale x (code - 8) + base with base = least + 8 x scale. Codes become float16, less 8, in registers, two by
// two instructions: their bits are those below 1,024, or 16 times as large. Products are of float16. Of keys the scales
// go to the scores, and so does base times the sum of a half of the query. Of values the scales go to the weights
// (`refer`), of which there are two then, and the bases to an offset, which all dimensions of a half have in common.
//
// What a lane has of codes is four bytes at a time. Of keys these are dimensions 4 c to 4 c + 3 of 16 (c = lane % 4), of
// either half: products take the first and third of them as 2 c and 2 c + 1, the others as 2 c + 8 and 2 c + 9. Of values
// the turning load takes two neighbours of a row for one 16-bit number: bytes 2 g and 2 g + 1 (g = lane / 4) of tokens
// 2 c and 2 c + 1, and those dimensions are rows g and g + 8 of the product.

constexpr int PAIRED = UNITS / 2;                // units of bytes: each has one of the lower half and one of the upper

struct Queries {
    u32 pairs[UNITS][2];  // dimensions 16 u + 4 (lane % 4) and the second from there, then the others, of query lane / 4
    float factor[2];      // of the products with queries 2 (lane % 4) and the next
    float halves[2][2];   // sums of the lower and the upper half of these two
};

__device__ __forceinline__ Queries queries_of(const Arguments&, const Shared& shared, int lane) {
    Queries q;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        const u16* row = &shared.queries[lane / 4][16 * u + lane % 4 * 4];
        const u32 front = *reinterpret_cast<const u32*>(row), back = *reinterpret_cast<const u32*>(row + 2);
        q.pairs[u][0] = bytes_of(front, back, 0x5410);
        q.pairs[u][1] = bytes_of(front, back, 0x7632);
    }
    for (int i = 0; i < 2; ++i) {
        const int query = lane % 4 * 2 + i;
        q.factor[i] = query < GROUP ? shared.factors[query] : 0.0f;
        for (int half = 0; half < 2; ++half) q.halves[half][i] = query < GROUP ? shared.halves[query][half] : 0.0f;
    }
    return q;
}

// The upper 16 bits of the nearest bfloat16.
__device__ __forceinline__ u32 shortened(float x) {
    const u32 bits = __float_as_uint(x);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ void keep(const float (&x)[EACH], Stored* codes, Stored* scales, float* numbers, int lane) {
    float least = x[0], largest = x[0];
    u32 size = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u32 bits = __float_as_uint(x[i]) & 0x7FFFFFFF;
        least = fminf(least, x[i]), largest = fmaxf(largest, x[i]), size = bits > size ? bits : size;
    }
    for (int distance = 8; distance; distance /= 2) {  // a half is 16 lanes'
        const u32 other = __shfl_xor_sync(~0u, size, distance);
        least = fminf(least, __shfl_xor_sync(~0u, least, distance));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        size = other > size ? other : size;
    }
    const bool none = size >= 0x7F800000;
    const u32 step = none ? 0x7FC0 : shortened((largest - least) * (1.0f / 15)), floor = none ? 0x7FC0 : shortened(least);
    const float scale = __uint_as_float(step << 16), base = __uint_as_float(floor << 16);
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int code = nearest(fminf(fmaxf((x[i] - base) * inverse, 0.0f), 15.0f));
        numbers[lane * EACH + i] = static_cast<float>(code) * scale + base;
        mine |= static_cast<u32>(code) << 8 * i;
    }
    const u32 upper = __shfl_xor_sync(~0u, mine, 16);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (lane < 16) codes[lane * EACH + i] = static_cast<Stored>((mine | upper << 4) >> 8 * i);
    }
    if (lane % 16 == 0) reinterpret_cast<u32*>(scales)[lane / 16] = step | floor << 16;
}

// Of bytes 0 and 2 the lower codes, or the upper ones, less 8.
__device__ __forceinline__ u32 lower_two(u32 bytes) {
    return multiply_add_halves(masked_with(bytes, 0x000F000F, 0x64006400), 0x3C003C00, 0xE408E408);
}

__device__ __forceinline__ u32 upper_two(u32 bytes) {
    return multiply_add_halves(masked_with(bytes, 0x00F000F0, 0x64006400), 0x2C002C00, 0xD480D480);
}

// sum += codes x with, of the lower half and of the upper one. Of four words, in the order in which a product has its
// rows and columns, bytes 0 and 2 count.
__device__ __forceinline__ void multiply_codes(float (&lower)[4], float (&upper)[4], const u32 (&words)[4],
                                               const u32 (&with_lower)[2], const u32 (&with_upper)[2]) {
    const u32 a[4] = {lower_two(words[0]), lower_two(words[1]), lower_two(words[2]), lower_two(words[3])};
    const u32 b[4] = {upper_two(words[0]), upper_two(words[1]), upper_two(words[2]), upper_two(words[3])};
    multiply_halves(lower, a, with_lower[0], with_lower[1]);
    multiply_halves(upper, b, with_upper[0], with_upper[1]);
}

// scale and base of a half of a row.
__device__ __forceinline__ float scale_of(u32 both) { return __uint_as_float(both << 16); }

__device__ __forceinline__ float base_of(u32 both) { return __uint_as_float(both & 0xFFFF0000) + 8.0f * scale_of(both); }

__device__ __forceinline__ int exponent_of(u32 both) { return static_cast<int>(both >> 7 & 255); }

// A scale in units of 2^(power - 127); 0 for what is too small.
__device__ __forceinline__ float scale_in(u32 both, int power) {
    const int bits = static_cast<int>(both << 16) + ((127 - power) << 23);
    return exponent_of(both) == 0 || bits < 0 ? 0.0f : __uint_as_float(bits);
}

// A warp's OWN tokens of a stage, of which [low, high) count.
__device__ __forceinline__ void add_own(Sums& sums, const Queries& q, u32 stages, u32 stage, int part, int low, int high,
                                        int lane) {
    const u32 keys = stages + stage * STAGE_BYTES, values = keys + KEY_BYTES;
    const u32 scales = stages + STAGES * STAGE_BYTES + stage * SCALES + (part * OWN + lane / 4) * SCALE;
    u32 k[TILES][PAIRED / 2][4], v[TILES][PAIRED / 2][4], of_key[TILES][2][2], of_value[TILES][2][2], place[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        // Rows of the four matrices that are loaded at once: 16 tokens' two units. Further units differ in a bit that is 0.
        place[t] = swizzled((part * OWN + t * 16 + lane / 8 % 2 * 8 + lane % 8) * ROW + lane / 16 * 16);
#pragma unroll
        for (int u = 0; u < PAIRED / 2; ++u) load_matrices(k[t][u], keys + (place[t] ^ u * 32));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_two(scales + (t * 16 + i * 8) * SCALE, of_key[t][i]);
            load_two(scales + (TURN + t * 16 + i * 8) * SCALE, of_value[t][i]);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int u = 0; u < PAIRED / 2; ++u) load_matrices_turned(v[t][u], values + (place[t] ^ u * 32));
    }
    float s[TILES][2][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int u = 0; u < PAIRED; ++u) {
            const u32 first = k[t][u / 2][u % 2 * 2], second = k[t][u / 2][u % 2 * 2 + 1];
            const u32 words[4] = {first, second, first >> 8, second >> 8};
            multiply_codes(s[t][0], s[t][1], words, q.pairs[u], q.pairs[PAIRED + u]);
        }
    }
    const int mine = lane / 4;
    float score[TILES][4], top[2] = {LOWEST, LOWEST};
    int power = 0;
    bool counts[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int token = mine + t * 16 + row * 8;
            counts[t][row] = token >= low && token < high;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = 0.0f;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u32 both = of_key[t][row][half];
                    sum += s[t][half][row * 2 + i] * scale_of(both) + q.halves[half][i] * base_of(both);
                }
                score[t][row * 2 + i] = counts[t][row] ? sum * q.factor[i] : LOWEST;
                top[i] = fmaxf(top[i], score[t][row * 2 + i]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int exponent = exponent_of(of_value[t][row][half]);
                if (counts[t][row] && exponent > power) power = exponent;
            }
        }
    }
    refer(sums, top, power);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        float weight[2][4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Not by the score: a NaN of what nobody has written stays out.
                const float one = counts[t][row] ? power_of_2(score[t][row * 2 + i] - sums.phi[i]) : 0.0f;
                sums.total[i] += one;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u32 both = of_value[t][row][half];
                    weight[half][row * 2 + i] = counts[t][row] ? one * scale_in(both, sums.power) : 0.0f;
                    sums.offset[half][i] += counts[t][row] ? one * base_of(both) : 0.0f;
                }
            }
        }
        u32 by[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            by[half][0] = turned(two_halves(weight[half][0], weight[half][1]));
            by[half][1] = turned(two_halves(weight[half][2], weight[half][3]));
        }
#pragma unroll
        for (int u = 0; u < PAIRED; ++u) {
            const u32 first = v[t][u / 2][u % 2 * 2], second = v[t][u / 2][u % 2 * 2 + 1];
            const u32 words[4] = {first, first >> 8, second, second >> 8};
            multiply_codes(sums.weighted[u], sums.weighted[PAIRED + u], words, by[0], by[1]);
        }
    }
}
