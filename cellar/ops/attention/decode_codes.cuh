// K and V of decodes as codes with something for each row that turns them into numbers (`decode.cu`,
// `ops/kv_format.py`), what both formats have in common: of a chunk and head CHUNK rows of codes, then their scales.
//
// The queries come in float16, each row times a power of two that makes it large, so that no bit of a number is lost.
// `decode_fp8.cuh` or `decode_int4.cuh` takes codes apart.

#if INT4
constexpr int ROW = DIM / 2, SCALE = 8;          // bytes of a row's codes, and of what stands behind them
#else
constexpr int ROW = DIM, SCALE = 1;
#endif
constexpr u32 KEY_BYTES = TURN * ROW;            // of a stage; as many of values behind them
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES, SCALES = 2 * TURN * SCALE;  // which stand behind all stages' codes
constexpr u32 ALL_STAGES = STAGES * (STAGE_BYTES + SCALES);
constexpr u32 CHUNK_BYTES = CHUNK * ROW;
constexpr int UNITS = DIM / 16;                  // of a row: the columns of a product
constexpr int EACH = DIM / 32;                   // dimensions that a lane has of a row in turn
constexpr int NEAR = 4;

static_assert(DIM <= 128 && PER_TURN * 4 <= 32 && CHUNK_BYTES % 1024 == 0);

// Where the copy engine puts a byte: blocks of 16 of a line of 128 are exchanged by the line's number.
__device__ __forceinline__ u32 swizzled(u32 place) { return place ^ (place >> 3 & 0x70); }

// A stage's chunks: slots of 32 chunks are known, one a lane; `here` of them from the lane `ahead` on.
__device__ __forceinline__ void load_turn(const TensorMap* keys, const TensorMap* values, const Arguments& a, u32 stages,
                                          u32 stage, u32 full, int head, int known, int ahead, int here, int lane) {
    if (lane == 0) barrier_expect(full, here * 2 * (CHUNK_BYTES + CHUNK * SCALE));
    __syncwarp();
    const int which = lane / 4, of_values = lane / 2 % 2;
    const int slot = __shfl_sync(~0u, known, (ahead + which) % 32);
    if (which >= here) return;
    if (lane % 2 == 0) {
        const u32 to = stages + stage * STAGE_BYTES + of_values * KEY_BYTES + which * CHUNK_BYTES;
        load_box(of_values ? values : keys, to, full, 0, 0, 0, head, slot);
    } else {
        const Stored* of = of_values ? a.v_cache + slot * a.v_slot : a.k_cache + slot * a.k_slot;
        const u32 to = stages + STAGES * STAGE_BYTES + stage * SCALES + (of_values * TURN + which * CHUNK) * SCALE;
        load_bytes(to, of + head * a.cache_head + CHUNK_BYTES, CHUNK * SCALE, full);
    }
}

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

// A new row of K or V, in a warp: codes and scales to the cache, the numbers that they mean to `numbers`.
__device__ __forceinline__ void keep(const float (&x)[EACH], Stored* codes, Stored* scales, float* numbers, int lane);

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
            float* numbers = row == GROUP ? shared.new_key : shared.new_value;
            keep(x, piece + place * ROW, piece + CHUNK_BYTES + place * SCALE, numbers, lane);
            continue;
        }
        // The largest comes to 2^14 or more, but less than 2^15.
        const int found = static_cast<int>(largest_bits(x) >> 23), up = found > 15 ? 268 - found : 253;
        const float larger = power_at(up);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            const u32 pair = two_halves(x[i] * larger, x[i + 1] * larger);
            *reinterpret_cast<u32*>(&shared.queries[row][lane * EACH + i]) = pair;
            sum += of_half(pair & 0xFFFF) + of_half(pair >> 16);
        }
        if (lane == 0) shared.factors[row] = a.scale * power_at(254 - up);
#if INT4
        for (int distance = 8; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane % 16 == 0) shared.halves[row][lane / 16] = sum;
#endif
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

struct Sums {
    float weighted[UNITS][4];  // O^T: dimension 16 u + 2 (lane / 4), queries 2 (lane % 4) and the next; the next dimension
    float phi[2], total[2];    // of these two queries
    int power;                 // the sums are in units of 2^(power - 127)
#if INT4
    float offset[2][2];        // of each half of the dimensions, what is added to all of them
#endif
    bool none;
};

// The scales of values go to the weights, relative to a reference that a warp takes from the first tokens it sees of an
// item, and moves where one exceeds it by more than 2^NEAR: weights stay in the range of float16. `top` of the scores of
// tokens that count, and the largest exponent of their values' scales.
__device__ __forceinline__ void refer(Sums& sums, const float (&top)[2], int power) {
    const bool far = top[0] > sums.phi[0] + FAR || top[1] > sums.phi[1] + FAR || power > sums.power + NEAR;
    if (!sums.none && !__any_sync(~0u, far)) return;
    const int most = static_cast<int>(most_in_warp(power)), reference = most > sums.power ? most : sums.power;
    const float smaller = power_of_2(static_cast<float>(sums.power - reference));
    sums.power = reference;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float phi = fmaxf(sums.phi[i], over_rows(top[i])), shrink = power_of_2(sums.phi[i] - phi);
        sums.phi[i] = phi;
        sums.total[i] *= shrink;
#if INT4
        sums.offset[0][i] *= shrink;
        sums.offset[1][i] *= shrink;
#endif
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            sums.weighted[u][i] *= shrink * smaller;
            sums.weighted[u][i + 2] *= shrink * smaller;
        }
    }
    sums.none = false;
}

__device__ __forceinline__ void put(Sums& sums, Shared& shared, int warp, int lane) {
    const float unit = power_at(sums.power);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = lane % 4 * 2 + i;
        for (int distance = 4; distance < 32; distance *= 2) {
            sums.total[i] += __shfl_xor_sync(~0u, sums.total[i], distance);
#if INT4
            sums.offset[0][i] += __shfl_xor_sync(~0u, sums.offset[0][i], distance);
            sums.offset[1][i] += __shfl_xor_sync(~0u, sums.offset[1][i], distance);
#endif
        }
        if (query >= GROUP) continue;
        if (lane < 4) shared.tops[warp][query] = sums.phi[i], shared.totals[warp][query] = sums.total[i];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#if INT4
            const float offset = sums.offset[u / (UNITS / 2)][i];
#else
            const float offset = 0.0f;
#endif
            shared.sums[warp][query][16 * u + lane / 4 * 2] = sums.weighted[u][i] * unit + offset;
            shared.sums[warp][query][16 * u + lane / 4 * 2 + 1] = sums.weighted[u][i + 2] * unit + offset;
        }
    }
}
