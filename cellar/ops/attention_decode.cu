// Attention of decodes on Hopper: one block per multiprocessor works through the list (attention_plan), one warp loads K
// and V by the copy engine without a pause between items, the others compute. Rotary embedding and the write of the new
// K and V are inside, as in `decode_attention`.
//
// Tokens are the tall operand: S^T = K Q^T and O^T = V^T P^T, so that a group of up to eight heads fills an instruction.
// Weights are 2^(s - phi) with a reference phi that a warp takes from the first tokens it sees of an item; only where a
// score exceeds it by more than 8 does it move (FlashDecoding++ §3: no maximum to be agreed on at every step).
//
// Set by the compiler's options: DIM (multiples of 64), CHUNK (16, 32, 64), KV_HEADS, GROUP (up to 8), WARPS (multiples
// of 4), STAGES, BF16 (else float16).

constexpr int TURN = 64;                         // tokens of a stage: 16 for each of a team's four warps
constexpr int HALVES = DIM / 64;                 // of a row, 128 bytes each: what the copy engine swizzles
constexpr int PER_TURN = TURN / CHUNK;
constexpr u32 HALF_BYTES = CHUNK * 128;
constexpr u32 CHUNK_BYTES = CHUNK * DIM * 2;
constexpr u32 KEY_BYTES = TURN * DIM * 2;        // of a stage; as many of values behind them
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES;
constexpr int TEAMS = WARPS / 4;                 // they take stages by turns
constexpr int THREADS = WARPS * 32;              // that compute
constexpr int SUM_PITCH = DIM + 4;               // floats: lanes of different queries write to different banks
constexpr int Q_PITCH = DIM + 8;                 // 16-bit: eight queries are read from different banks
constexpr int TILE = 16;                         // rows of a part in the scratch
constexpr float FAR = 8.0f, LOWEST = -1.0e30f;

static_assert(DIM % 64 == 0 && TURN % CHUNK == 0 && WARPS % 4 == 0 && GROUP <= 8);
static_assert(PER_TURN * 2 * HALVES <= 32);
// A stage is one team's: who skipped a round of it would take the round before for the one it waits for.
static_assert(STAGES % TEAMS == 0);

struct Shared {  // beside the stages
    float sums[WARPS][GROUP][SUM_PITCH];
    float tops[WARPS][GROUP];
    float totals[WARPS][GROUP];
    float new_key[DIM];
    float new_value[DIM];
    float new_score[GROUP];
    alignas(16) u16 queries[8][Q_PITCH];
    u64 full[STAGES];
    u64 empty[STAGES];
    int arrived;
};

struct Arguments {
    const u16* q;
    const u16* k;
    const u16* v;
    const float* cos_sin;
    u16* k_cache;
    u16* v_cache;
    const int* table;
    u16* out;
    const int* meta;
    float* partial;
    float* extents;
    int* counters;
    long long q_token, q_head, k_token, k_head, v_token, v_head, k_slot, v_slot, cache_head, table_row, out_token, out_head;
    float scale;
    int rotary_dim;
};

struct Item {
    int row, token, start, first, last, partial, part, parts, counter, stop;
};

__device__ __forceinline__ Item item_at(const int* meta, int number) {
    const int* at = meta + 16 + number * 16;
    Item item;
    item.row = at[0], item.token = at[1], item.start = at[4], item.first = at[5], item.last = at[6];
    item.partial = at[7], item.part = at[8], item.parts = at[9], item.counter = at[10];
    item.stop = item.last < item.start ? item.last : item.start;  // of what lies in the cache
    return item;
}

// There and back, so that nobody gets the longest of every round.
__device__ __forceinline__ int index_of(int round) {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

__device__ __forceinline__ void sync_computing() { sync_threads(1, THREADS); }

__device__ __forceinline__ float over_rows(float x) {  // the largest of the lanes that hold the same query
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

// Element d of a head with its rotary embedding; its partner lies half of the turning dimensions away.
__device__ __forceinline__ float rotated(const u16* x, const float* cos_sin, int rotary_dim, int position, int d) {
    const float mine = one(x[d]);
    if (d >= rotary_dim) return mine;
    const int half = rotary_dim / 2, pair = d < half ? d : d - half;
    const float* at = cos_sin + static_cast<long long>(position) * rotary_dim + pair;
    const float other = one(x[d < half ? d + half : pair]), sine = at[half];
    return mine * at[0] + other * (d < half ? -sine : sine);
}

// -- the warp that loads ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_all(const TensorMap* keys, const TensorMap* values, const Arguments& a, u32 stages,
                                         Shared& shared, int lane) {
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const int count = a.meta[0] * KV_HEADS;
    u32 at = 0;
    for (int round = 0; round * static_cast<int>(gridDim.x) < count; ++round) {
        const int index = index_of(round);
        if (index >= count) continue;
        const Item item = item_at(a.meta, index / KV_HEADS);
        if (item.stop <= item.first) continue;
        const int head = index % KV_HEADS;
        const int begin = item.first / CHUNK, end = (item.stop - 1) / CHUNK + 1;
        const int* slots = a.table + item.row * a.table_row;
        int known = 0;  // slots of 32 chunks, one a lane
        for (int chunk = begin; chunk < end; chunk += PER_TURN, ++at) {
            const int ahead = (chunk - begin) % 32;
            if (ahead == 0) known = chunk + lane < end ? slots[chunk + lane] : 0;
            const int here = end - chunk < PER_TURN ? end - chunk : PER_TURN;
            const u32 s = at % STAGES;
            if (at >= STAGES) barrier_wait(empty + 8 * s, (at / STAGES - 1) & 1);
            if (lane == 0) barrier_expect(full + 8 * s, here * 2 * CHUNK_BYTES);
            __syncwarp();
            const int which = lane / (2 * HALVES), of_values = lane / HALVES % 2, half = lane % HALVES;
            const int slot = __shfl_sync(~0u, known, (ahead + which) % 32);
            if (which < here) {
                const u32 to = stages + s * STAGE_BYTES + of_values * KEY_BYTES + which * CHUNK_BYTES + half * HALF_BYTES;
                load_box(of_values ? values : keys, to, full + 8 * s, 0, half, 0, head, slot);
            }
        }
    }
    let_next_kernel_start();
}

// -- the warps that compute ------------------------------------------------------------------------------------------

struct Sums {
    float weighted[DIM / 16][4];  // O^T: dimensions 16 j + lane / 4 and eight further, queries 2 (lane % 4) and the next
    float phi[2], total[2];       // of these two queries
    bool none;
};

// The queries with their embedding, and K and V of the newest position, which are written to the cache, too.
__device__ __forceinline__ void prepare(const Arguments& a, const Item& item, int head, Shared& shared, int thread) {
    const u16* q = a.q + item.token * a.q_token;
    for (int i = thread; i < GROUP * DIM; i += THREADS) {
        const int g = i / DIM, d = i % DIM;
        const u16* row = q + (head * GROUP + g) * a.q_head;
        shared.queries[g][d] = narrow(rotated(row, a.cos_sin, a.rotary_dim, item.start, d));
    }
    if (item.last <= item.start) return;
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

// 16 tokens from `base` on, of which [low, high) count; K and V lie at `keys` and `values`.
__device__ __forceinline__ void add_tokens(Sums& sums, const u32 (&q)[DIM / 16][2], u32 keys, u32 values, int low, int high,
                                           float scale, int lane) {
    float s[2][4] = {};
    {
        const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            u32 a[4];
            const int place = (k % 4 * 2 + lane / 16) ^ (lane % 8);
            load_matrices(a, keys + k / 4 * HALF_BYTES + row * 128 + place * 16);
            multiply(s[k % 2], a, q[k][0], q[k][1]);
        }
    }
    const int mine = lane / 4;
    const bool upper = mine >= low && mine < high, lower = mine + 8 >= low && mine + 8 < high;
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = (i < 2 ? upper : lower) ? (s[0][i] + s[1][i]) * scale : LOWEST;
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

// The warps' sums and the newest position as one, into the result, or for an item of several parts into the scratch,
// where who comes last adds up all.
__device__ __forceinline__ void finish(const Arguments& a, const Item& item, int head, Shared& shared, int thread) {
    const bool newest = item.last > item.start, whole = item.parts == 1;
    u16* out = a.out + item.token * a.out_token + head * GROUP * a.out_head;
    for (int i = thread; i < GROUP * DIM; i += THREADS) {
        const int g = i / DIM, d = i % DIM;
        float top = newest ? shared.new_score[g] : LOWEST;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared.tops[w][g]);
        float total = newest ? power_of_2(shared.new_score[g] - top) : 0.0f;
        float sum = newest ? total * shared.new_value[d] : 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float grow = power_of_2(shared.tops[w][g] - top);
            total += shared.totals[w][g] * grow;
            sum += shared.sums[w][g][d] * grow;
        }
        if (whole) {
            out[g * a.out_head + d] = narrow(sum / (total > 0.0f ? total : 1.0f));
        } else {
            const long long row = static_cast<long long>(item.partial + item.part * TILE + g) * KV_HEADS + head;
            a.partial[row * DIM + d] = sum;
            if (d == 0) a.extents[row * 2] = top, a.extents[row * 2 + 1] = total;
        }
    }
    if (whole) return;
    __threadfence();
    sync_computing();
    int* counter = a.counters + item.counter * KV_HEADS + head;
    if (thread == 0) shared.arrived = atomicAdd(counter, 1) + 1;
    sync_computing();
    if (shared.arrived != item.parts) return;
    __threadfence();
    if (thread == 0) *counter = 0;
    for (int i = thread; i < GROUP * DIM; i += THREADS) {
        const int g = i / DIM, d = i % DIM;
        const long long first = static_cast<long long>(item.partial + g) * KV_HEADS + head;
        float top = LOWEST, total = 0.0f, sum = 0.0f;
#pragma unroll 4
        for (int part = 0; part < item.parts; ++part) {
            const long long row = first + static_cast<long long>(part) * TILE * KV_HEADS;
            const float its_top = from_others(a.extents + row * 2), its_total = from_others(a.extents + row * 2 + 1);
            const float its_sum = from_others(a.partial + row * DIM + d);
            const float higher = fmaxf(top, its_top), shrink = power_of_2(top - higher), grow = power_of_2(its_top - higher);
            total = total * shrink + its_total * grow;
            sum = sum * shrink + its_sum * grow;
            top = higher;
        }
        out[g * a.out_head + d] = narrow(sum / (total > 0.0f ? total : 1.0f));
    }
}

__device__ __forceinline__ void compute_all(const Arguments& a, u32 stages, Shared& shared, int thread) {
    const int warp = thread / 32, lane = thread % 32, team = warp / 4, tile = warp % 4;
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const u32 inside = tile * 16 / CHUNK * CHUNK_BYTES + tile * 16 % CHUNK * 128;  // of a stage: this warp's tokens
    for (int i = thread; i < 8 * Q_PITCH; i += THREADS) shared.queries[i / Q_PITCH][i % Q_PITCH] = 0;
    wait_for_kernel_in_front();
    const int count = a.meta[0] * KV_HEADS;
    u32 at = 0;
    Item next = item_at(a.meta, blockIdx.x < count ? blockIdx.x / KV_HEADS : 0);
    for (int round = 0; round * static_cast<int>(gridDim.x) < count; ++round) {
        const int index = index_of(round), following = index_of(round + 1);
        if (index >= count) continue;
        const Item item = next;
        const int head = index % KV_HEADS;
        if (following < count) next = item_at(a.meta, following / KV_HEADS);  // on its way while this one is computed
        sync_computing();  // of the item before nobody needs anything any more
        prepare(a, item, head, shared, thread);
        sync_computing();
        if (item.last > item.start) score_newest(a, shared, warp, lane);
        u32 q[DIM / 16][2];
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            const u16* row = &shared.queries[lane / 4][16 * k + lane % 4 * 2];
            q[k][0] = *reinterpret_cast<const u32*>(row);
            q[k][1] = *reinterpret_cast<const u32*>(row + 8);
        }
        Sums sums = {};
        sums.phi[0] = sums.phi[1] = LOWEST;
        sums.none = true;
        const int begin = item.first < item.stop ? item.first / CHUNK * CHUNK : item.stop;
        for (int turn = begin; turn < item.stop; turn += TURN, ++at) {
            if (at % TEAMS != team) continue;
            const u32 s = at % STAGES, keys = stages + s * STAGE_BYTES + inside, values = keys + KEY_BYTES;
            const int low = item.first - (turn + tile * 16), high = item.stop - (turn + tile * 16);
            barrier_wait(full + 8 * s, at / STAGES & 1);
            if (low < 16 && high > 0) {
                if (high < 16) clear_values(values, high, lane);
                add_tokens(sums, q, keys, values, low, high, a.scale, lane);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * s);
        }
        put(sums, shared, warp, lane);
        sync_computing();
        finish(a, item, head, shared, thread);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    decode_attention(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                     const __grid_constant__ Arguments arguments) {
    unsigned char* memory = shared_memory();
    const u32 stages = (shared_address(memory) + 1023) & ~1023u;
    Shared& shared = *reinterpret_cast<Shared*>(memory + (stages - shared_address(memory)) + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared_address(&shared.full[s]), 1);
            barrier_init(shared_address(&shared.empty[s]), 4);
        }
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        load_all(&keys, &values, arguments, stages, shared, threadIdx.x - THREADS);
    } else {
        compute_all(arguments, stages, shared, threadIdx.x);
    }
}
