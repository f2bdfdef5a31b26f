// K and V of decodes as the queries are: 16-bit floats (`decode.cu`).
//
// The newest K and V are written as they come; products are with what is loaded.

constexpr int HALVES = DIM / 64;                 // of a row, 128 bytes each: what the copy engine swizzles
constexpr u32 HALF_BYTES = CHUNK * 128;
constexpr u32 CHUNK_BYTES = CHUNK * DIM * 2;
constexpr u32 KEY_BYTES = TURN * DIM * 2;        // of a stage; as many of values behind them
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES, ALL_STAGES = STAGES * STAGE_BYTES;

static_assert(PER_TURN * 2 * HALVES <= 32 && TILES == 1);

// A stage's chunks: slots of 32 chunks are known, one a lane; `here` of them from the lane `ahead` on.
__device__ __forceinline__ void load_turn(const TensorMap* keys, const TensorMap* values, const Arguments&, u32 stages, u32 s,
                                          u32 full, int head, int known, int ahead, int here, int lane) {
    if (lane == 0) barrier_expect(full, here * 2 * CHUNK_BYTES);
    __syncwarp();
    const int which = lane / (2 * HALVES), of_values = lane / HALVES % 2, half = lane % HALVES;
    const int slot = __shfl_sync(~0u, known, (ahead + which) % 32);
    if (which < here) {
        const u32 to = stages + s * STAGE_BYTES + of_values * KEY_BYTES + which * CHUNK_BYTES + half * HALF_BYTES;
        load_box(of_values ? values : keys, to, full, 0, half, 0, head, slot);
    }
}

struct Queries {
    u32 pairs[DIM / 16][2];  // dimensions 16 k + 2 (lane % 4) and the next, and eight further, of query lane / 4
    float scale;
};

__device__ __forceinline__ Queries queries_of(const Arguments& a, const Shared& shared, int lane) {
    Queries q;
    q.scale = a.scale;
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
        const u16* row = &shared.queries[lane / 4][16 * k + lane % 4 * 2];
        q.pairs[k][0] = *reinterpret_cast<const u32*>(row);
        q.pairs[k][1] = *reinterpret_cast<const u32*>(row + 8);
    }
    return q;
}

struct Sums {
    float weighted[DIM / 16][4];  // O^T: dimensions 16 j + lane / 4 and eight further, queries 2 (lane % 4) and the next
    float phi[2], total[2];       // of these two queries
    bool none;
};

// The queries with their embedding, and K and V of the newest position, which are written to the cache, too.
__device__ __forceinline__ void prepare(const Arguments& a, const Item& item, Shared& shared, int thread) {
    const int head = item.head;
    const u16* q = a.q + item.token * a.q_token;
    for (int i = thread; i < GROUP * DIM; i += THREADS) {
        const int g = i / DIM, d = i % DIM;
        const u16* row = q + (head * GROUP + g) * a.q_head;
        shared.queries[g][d] = narrow(rotated(row, a.cos_sin, a.rotary_dim, item.start, d));
    }
    if (!item.newest) return;
    const u16* k = a.k + item.token * a.k_token + head * a.k_head;
    const u16* v = a.v + item.token * a.v_token + head * a.v_head;
    const long long slot = a.table[item.row * a.table_row + item.start / CHUNK];
    const long long inside = head * a.cache_head + item.start % CHUNK * DIM;
    for (int d = thread; d < DIM; d += THREADS) {
        const u16 key = narrow(rotated(k, a.cos_sin, a.rotary_dim, item.start, d)), value = v[d];
        a.k_cache[slot * a.k_slot + inside + d] = key;
        a.v_cache[slot * a.v_slot + inside + d] = value;
        shared.new_key[d] = one(key);
        shared.new_value[d] = one(value);
    }
}

__device__ __forceinline__ void score_newest(const Arguments& a, Shared& shared, int warp, int lane) {
    for (int g = warp; g < GROUP; g += WARPS) {
        float sum = 0.0f;
        for (int d = lane; d < DIM; d += 32) sum += one(shared.queries[g][d]) * shared.new_key[d];
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) shared.new_score[g] = sum * a.scale;
    }
}

// Zeros instead of values that nobody has written: 0 times NaN is NaN.
__device__ __forceinline__ void clear_values(u32 values, int from, int lane) {
    for (int i = lane; i < (16 - from) * HALVES * 8; i += 32) {
        const int row = from + i / (HALVES * 8), half = i / 8 % HALVES;
        clear_shared(values + half * HALF_BYTES + row * 128 + i % 8 * 16);
    }
    // The copy engine writes there next.
    stores_before_copies();
    __syncwarp();
}

// A warp's 16 tokens of a stage, of which [low, high) count.
__device__ __forceinline__ void add_own(Sums& sums, const Queries& q, u32 stages, u32 stage, int tile, int low, int high,
                                        int lane) {
    const u32 keys = stages + stage * STAGE_BYTES + tile * 16 / CHUNK * CHUNK_BYTES + tile * 16 % CHUNK * 128;
    const u32 values = keys + KEY_BYTES;
    if (high < 16) clear_values(values, high, lane);
    float s[2][4] = {};
    {
        const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            u32 a[4];
            const int place = (k % 4 * 2 + lane / 16) ^ (lane % 8);
            load_matrices(a, keys + k / 4 * HALF_BYTES + row * 128 + place * 16);
            multiply(s[k % 2], a, q.pairs[k][0], q.pairs[k][1]);
        }
    }
    const int mine = lane / 4;
    const bool upper = mine >= low && mine < high, lower = mine + 8 >= low && mine + 8 < high;
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = (i < 2 ? upper : lower) ? (s[0][i] + s[1][i]) * q.scale : LOWEST;
    const float top[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
    if (sums.none || __any_sync(~0u, top[0] > sums.phi[0] + FAR || top[1] > sums.phi[1] + FAR)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float phi = fmaxf(sums.phi[i], over_rows(top[i])), shrink = power_of_2(sums.phi[i] - phi);
            sums.phi[i] = phi;
            sums.total[i] *= shrink;
#pragma unroll
            for (int j = 0; j < DIM / 16; ++j) {
                sums.weighted[j][i] *= shrink;
                sums.weighted[j][i + 2] *= shrink;
            }
        }
        sums.none = false;
    }
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Not by the score: a NaN of what nobody has written stays out.
        weight[i] = (i < 2 ? upper : lower) ? power_of_2(score[i] - sums.phi[i % 2]) : 0.0f;
        sums.total[i % 2] += weight[i];
    }
    const u32 b0 = turned(two(weight[0], weight[1])), b1 = turned(two(weight[2], weight[3]));
    const int row = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < DIM / 16; ++j) {
        u32 a[4];
        const int place = (j % 4 * 2 + lane / 8 % 2) ^ (lane % 8);
        load_matrices_turned(a, values + j / 4 * HALF_BYTES + row * 128 + place * 16);
        multiply(sums.weighted[j], a, b0, b1);
    }
}

__device__ __forceinline__ void put(Sums& sums, Shared& shared, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = lane % 4 * 2 + i;
        for (int distance = 4; distance < 32; distance *= 2) {
            sums.total[i] += __shfl_xor_sync(~0u, sums.total[i], distance);
        }
        if (query >= GROUP) continue;
        if (lane < 4) shared.tops[warp][query] = sums.phi[i], shared.totals[warp][query] = sums.total[i];
#pragma unroll
        for (int j = 0; j < DIM / 16; ++j) {
            shared.sums[warp][query][16 * j + lane / 4] = sums.weighted[j][i];
            shared.sums[warp][query][16 * j + lane / 4 + 8] = sums.weighted[j][i + 2];
        }
    }
}
