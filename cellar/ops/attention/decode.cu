// Attention of decodes on Hopper: few blocks work through the list (plan.py), each taking the next item when it has
// loaded one. One warp loads K and V by the copy engine without a pause between items, the others compute. Rotary embedding and the write of the new
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
constexpr int FIELDS = 16;                       // of an item in the list, and of the list's header
constexpr float FAR = 8.0f, LOWEST = -1.0e30f;

static_assert(DIM % 64 == 0 && TURN % CHUNK == 0 && WARPS % 4 == 0 && GROUP <= 8);
static_assert(PER_TURN * 2 * HALVES <= 32);
// A stage is one team's: who skipped a round of it would take the round before for the one it waits for.
static_assert(STAGES % TEAMS == 0);

struct Shared {  // beside the stages
    float sums[WARPS][GROUP][SUM_PITCH];
    float tops[WARPS][GROUP];
    float totals[WARPS][GROUP];
    alignas(16) float new_key[DIM];
    alignas(16) float new_value[DIM];
    float new_score[GROUP];
    alignas(16) u16 queries[8][Q_PITCH];
    u64 full[STAGES];
    u64 empty[STAGES];
    u64 told[2], heard[2];
    int items[2][FIELDS];  // that are loaded: the list's fields, and in the last one the KV head, or -1 for the end
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
    int* claimed;
    long long q_token, q_head, k_token, k_head, v_token, v_head, k_slot, v_slot, cache_head, table_row, out_token, out_head;
    float scale;
    int rotary_dim;
    int early;  // whether the next kernel's blocks may start where there is room
};

struct Item {
    int row, token, start, first, last, partial, part, parts, counter, head;
    int stop;  // of what lies in the cache
};

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

// The first items are the blocks' own; then each takes one that nobody has. Who is the last to be told that there are no
// more puts the count back for the next launch.
__device__ __forceinline__ int claim(const Arguments& a, int count) {
    const int before = atomicAdd(a.claimed, 1);
    if (before == count - 1) {
        atomicExch(a.claimed, 0);
        __threadfence();
    }
    return before + gridDim.x;
}

__device__ __forceinline__ void load_all(const TensorMap* keys, const TensorMap* values, const Arguments& a, u32 stages,
                                         Shared& shared, int lane) {
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const u32 told = shared_address(shared.told), heard = shared_address(shared.heard);
    // There are no more blocks than the list has room for, so that the first one is read before it is known to count.
    int mine = a.meta[(blockIdx.x / KV_HEADS + 1) * FIELDS + lane % FIELDS];
    const int count = a.meta[0] * KV_HEADS;
    u32 at = 0, items = 0;
    for (int index = blockIdx.x;; ++items) {
        const bool end_of_list = index >= count;
        const int head = end_of_list ? -1 : index % KV_HEADS;
        if (items > 0 && !end_of_list) mine = a.meta[(index / KV_HEADS + 1) * FIELDS + lane % FIELDS];
        if (end_of_list || lane == FIELDS - 1) mine = head;
        if (items >= 2) barrier_wait(heard + 8 * (items % 2), (items / 2 - 1) & 1);
        if (lane < FIELDS) shared.items[items % 2][lane] = mine;
        __syncwarp();
        if (lane == 0) barrier_arrive(told + 8 * (items % 2));
        if (end_of_list) break;
        int next = 0;
        if (lane == 0) next = claim(a, count);  // comes while this item is loaded
        const int row = __shfl_sync(~0u, mine, 0), start = __shfl_sync(~0u, mine, 4), first = __shfl_sync(~0u, mine, 5);
        const int last = __shfl_sync(~0u, mine, 6), stop = last < start ? last : start;
        const int begin = first / CHUNK, end = stop > first ? (stop - 1) / CHUNK + 1 : begin;
        const int* slots = a.table + row * a.table_row;
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
        index = __shfl_sync(~0u, next, 0);
    }
    if (a.early) let_next_kernel_start();
}

// -- the warps that compute ------------------------------------------------------------------------------------------

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
__device__ __forceinline__ void finish(const Arguments& a, const Item& item, Shared& shared, int thread) {
    const bool newest = item.last > item.start, whole = item.parts == 1;
    u16* out = a.out + item.token * a.out_token + item.head * GROUP * a.out_head;
    for (int i = thread; i < GROUP * DIM / 4; i += THREADS) {
        const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
        Part all = {LOWEST};
        if (newest) {
            all.top = shared.new_score[g], all.total = 1.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) all.sum[j] = shared.new_value[d + j];
        }
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            Part one = {shared.tops[w][g], shared.totals[w][g]};
            load_shared(shared_address(&shared.sums[w][g][d]), one.sum);
            all.add(one);
        }
        if (whole) {
            all.write(out + g * a.out_head + d);
        } else {
            const long long row = static_cast<long long>(item.partial + item.part * TILE + g) * KV_HEADS + item.head;
            store_global(a.partial + row * DIM + d, all.sum);
            if (d == 0) a.extents[row * 2] = all.top, a.extents[row * 2 + 1] = all.total;
        }
    }
    if (whole) return;
    __threadfence();
    sync_computing();
    int* counter = a.counters + item.counter * KV_HEADS + item.head;
    if (thread == 0) shared.arrived = atomicAdd(counter, 1) + 1;
    sync_computing();
    if (shared.arrived != item.parts) return;
    __threadfence();
    if (thread == 0) *counter = 0;
    for (int i = thread; i < GROUP * DIM / 4; i += THREADS) {
        const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
        const long long first = static_cast<long long>(item.partial + g) * KV_HEADS + item.head;
        const Part all = parts_at(a.partial, a.extents, first, TILE * KV_HEADS, item.parts, d);
        all.write(out + g * a.out_head + d);
    }
}

__device__ __forceinline__ void compute_all(const Arguments& a, u32 stages, Shared& shared, int thread) {
    const int warp = thread / 32, lane = thread % 32, team = warp / 4, tile = warp % 4;
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const u32 told = shared_address(shared.told), heard = shared_address(shared.heard);
    const u32 inside = tile * 16 / CHUNK * CHUNK_BYTES + tile * 16 % CHUNK * 128;  // of a stage: this warp's tokens
    for (int i = thread; i < 8 * Q_PITCH; i += THREADS) shared.queries[i / Q_PITCH][i % Q_PITCH] = 0;
    wait_for_kernel_in_front();
    u32 at = 0;
    for (u32 items = 0;; ++items) {
        barrier_wait(told + 8 * (items % 2), items / 2 & 1);
        const int* f = shared.items[items % 2];
        Item item = {f[0], f[1], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[FIELDS - 1]};
        item.stop = item.last < item.start ? item.last : item.start;
        __syncwarp();
        if (lane == 0) barrier_arrive(heard + 8 * (items % 2));
        if (item.head < 0) break;
        sync_computing();  // of the item before nobody needs anything any more
        prepare(a, item, shared, thread);
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
        finish(a, item, shared, thread);
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
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&shared.told[i]), 1);
            barrier_init(shared_address(&shared.heard[i]), WARPS);
        }
        barriers_made();
        prefetch(&keys);
        prefetch(&values);
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        load_all(&keys, &values, arguments, stages, shared, threadIdx.x - THREADS);
    } else {
        compute_all(arguments, stages, shared, threadIdx.x);
    }
}
