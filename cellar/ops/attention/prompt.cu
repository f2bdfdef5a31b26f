// Attention of prompts on Hopper: a block for each tile of packed rows (plan.py) and KV head. One warp loads Q, K
// and V by the copy engine, chunk by chunk from the cache; each warpgroup multiplies 64 rows, and computes the weights of
// a turn while the tensor cores still add up the turn before.
//
// Weights are 2^(s - phi) with a reference phi for each row, taken from its first turn; only where a score exceeds it by
// more than 8 does it move (FlashDecoding++ §3).
//
// Where decodes of the same step are behind (`early`), they may begin as soon as what both read is there, and take the
// multiprocessors that prompts leave (`decode.cuh`).
//
// Set by the compiler's options: DIM (64, 128), CHUNK (16, 32, 64), KV_HEADS, GROUP (a divisor of 64), TILE (64, 128),
// STAGES, BF16 (else float16).

constexpr int TURN = 128;  // tokens of a stage
constexpr int GROUPS = TILE / 64;
constexpr int THREADS = GROUPS * 128;  // that compute
constexpr int HALVES = DIM / 64;
constexpr int PER_TURN = TURN / CHUNK;
constexpr u32 HALF_BYTES = TURN * 128;       // of K or V: 64 dimensions of all tokens
constexpr u32 CHUNK_BYTES = CHUNK * DIM * 2;
constexpr u32 KEY_BYTES = TURN * DIM * 2;
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES;
constexpr u32 QUERY_BYTES = TILE * DIM * 2;
constexpr u32 QUERY_HALF = TILE * 128;
constexpr int REGISTERS = GROUPS == 2 ? 232 : 240;  // of a thread that computes; who loads gives his away
constexpr float FAR = 8.0f, LOWEST = -1.0e30f;

static_assert(DIM == 64 || DIM == 128);
static_assert((TILE == 64 || TILE == 128) && 64 % GROUP == 0 && TURN % CHUNK == 0);
static_assert(PER_TURN * HALVES <= 16);

struct Arguments {
    const int* table;
    u16* out;
    const int* meta;
    float* partial;
    float* extents;
    int* counters;
    long long table_row, out_token, out_head;
    float scale;
    int early;
};

struct Barriers {
    u64 queries, keys[STAGES], values[STAGES], keys_read[STAGES], values_read[STAGES];
    int arrived;
};

struct Item {
    int row, token, first, last, start, begin, end, partial, part, parts, counter;  // KV positions [begin, end)
};

__device__ __forceinline__ Item item_at(const int* meta, int number) {
    const int* at = meta + 32 + number * 16;
    return {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10]};
}

// -- the warp that loads ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_all(const TensorMap* queries, const TensorMap* keys, const TensorMap* values,
                                         const Arguments& a, const Item& item, int head, u32 memory, Barriers& barriers,
                                         int lane) {
    const u32 stages = memory + QUERY_BYTES;
    const int begin = item.begin / CHUNK, end = (item.end - 1) / CHUNK + 1;
    const int* slots = a.table + item.row * a.table_row;
    int known = begin + lane < end ? slots[begin + lane] : 0;  // slots of 32 chunks, one a lane
    wait_for_kernel_in_front();
    if (a.early) let_next_kernel_start();
    if (lane == 0) barrier_expect(shared_address(&barriers.queries), QUERY_BYTES);
    __syncwarp();
    if (lane < HALVES) {
        load_box(queries, memory + lane * QUERY_HALF, shared_address(&barriers.queries), 64 * lane, head * GROUP,
                 item.token + item.first / GROUP, 0, 0);
    }
    int turn = 0;
    for (int chunk = begin; chunk < end; chunk += PER_TURN, ++turn) {
        const int ahead = (chunk - begin) % 32, here = end - chunk < PER_TURN ? end - chunk : PER_TURN;
        if (turn && ahead == 0) known = chunk + lane < end ? slots[chunk + lane] : 0;
        const int s = turn % STAGES, which = lane % 16 / HALVES, half = lane % HALVES;
        const bool of_values = lane >= 16;
        const int slot = __shfl_sync(~0u, known, (ahead + which) % 32);
        if (turn >= STAGES) {
            barrier_wait(shared_address(&barriers.keys_read[s]), (turn / STAGES - 1) & 1);
        }
        if (lane == 0) barrier_expect(shared_address(&barriers.keys[s]), here * CHUNK_BYTES);
        __syncwarp();
        const u32 to = stages + s * STAGE_BYTES + of_values * KEY_BYTES + half * HALF_BYTES + which * CHUNK * 128;
        if (which < here && !of_values) {
            load_box(keys, to, shared_address(&barriers.keys[s]), 0, half, 0, head, slot);
        }
        if (turn >= STAGES) {
            barrier_wait(shared_address(&barriers.values_read[s]), (turn / STAGES - 1) & 1);
        }
        if (lane == 16) barrier_expect(shared_address(&barriers.values[s]), here * CHUNK_BYTES);
        __syncwarp();
        if (which < here && of_values) {
            load_box(values, to, shared_address(&barriers.values[s]), 0, half, 0, head, slot);
        }
    }
}

// -- the warpgroups that compute -------------------------------------------------------------------------------------

struct Rows {  // of a thread's two rows, eight apart
    float phi[2], total[2], shrink[2];
    int position[2];
    bool moved;
};

__device__ __forceinline__ float over_columns(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Scores of a turn to weights. `tested`: not every row sees every token.
__device__ __forceinline__ void weigh(float (&s)[TURN / 2], Rows& rows, const Item& item, int turn, bool tested, bool first,
                                      float scale, int lane) {
    float top[2] = {LOWEST, LOWEST};
    if (tested) {
#pragma unroll
        for (int i = 0; i < TURN / 2; ++i) {
            const int n = turn + i / 4 * 8 + lane % 4 * 2 + i % 2, row = i / 2 % 2;
            // Not by the score: a NaN of what nobody has written stays out.
            if (n < item.begin || n >= item.end || n > rows.position[row]) s[i] = LOWEST;
        }
    }
#pragma unroll
    for (int i = 0; i < TURN / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    rows.moved = __any_sync(~0u, first || top[0] * scale > rows.phi[0] + FAR || top[1] * scale > rows.phi[1] + FAR);
    if (rows.moved) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float highest = over_columns(top[row]);
            // A row that has seen nothing yet keeps the lowest, in which its weights are zero.
            const float phi = highest > LOWEST ? fmaxf(rows.phi[row], highest * scale) : rows.phi[row];
            rows.shrink[row] = power_of_2(rows.phi[row] - phi);
            rows.phi[row] = phi;
            rows.total[row] *= rows.shrink[row];
        }
    }
    const float low[2] = {rows.phi[0] > LOWEST ? rows.phi[0] : 0.0f, rows.phi[1] > LOWEST ? rows.phi[1] : 0.0f};
#pragma unroll
    for (int i = 0; i < TURN / 2; ++i) {
        s[i] = power_of_2(s[i] * scale - low[i / 2 % 2]);
        rows.total[i / 2 % 2] += s[i];
    }
}

// Weights as the tensor cores take them from registers.
__device__ __forceinline__ void pack(const float (&s)[TURN / 2], u32 (&weights)[TURN / 16][4]) {
#pragma unroll
    for (int k = 0; k < TURN / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[k][i] = two(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
}

__device__ __forceinline__ void ask_scores(float (&s)[TURN / 2], u32 queries, u32 keys) {
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
        const u64 a = descriptor(queries + k / 4 * QUERY_HALF + k % 4 * 32);
        multiply_wide(s, a, descriptor(keys + k / 4 * HALF_BYTES + k % 4 * 32), k > 0);
    }
    products_asked();
}

__device__ __forceinline__ void ask_sums(float (&sum)[DIM / 2], const u32 (&weights)[TURN / 16][4], u32 values) {
#pragma unroll
    for (int k = 0; k < TURN / 16; ++k) {
        multiply_turned(sum, weights[k], descriptor_turned(values + k * 16 * 128, HALF_BYTES), true);
    }
    products_asked();
}

// Zeros instead of values that nobody has written: 0 times NaN is NaN. Each warpgroup does it for itself.
__device__ __forceinline__ void clear_values(u32 values, int from, int group, int thread) {
    for (int i = thread; i < (TURN - from) * HALVES * 8; i += 128) {
        clear_shared(values + i / 8 % HALVES * HALF_BYTES + (from + i / (HALVES * 8)) * 128 + i % 8 * 16);
    }
    stores_before_copies();
    sync_threads(2 + group, 128);
}

__device__ __forceinline__ void shrink(float (&sum)[DIM / 2], const Rows& rows) {
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) sum[i] *= rows.shrink[i / 2 % 2];
}

// A warpgroup's rows through its part of the queries' memory, 16 bytes a thread.
__device__ __forceinline__ void write(const Arguments& a, const Item& item, int head, const float (&sum)[DIM / 2],
                                      const Rows& rows, u32 memory, int group, int thread) {
    const int row = group * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < DIM / 2; i += 2) {
        const float over = 1.0f / (rows.total[i / 2 % 2] > 0.0f ? rows.total[i / 2 % 2] : 1.0f);
        const int at = row + i / 2 % 2 * 8, block = i / 4;
        const u32 to = memory + block / 8 * QUERY_HALF + at * 128 + ((block % 8) ^ (at % 8)) * 16 + thread % 4 * 4;
        store_shared(to, two(sum[i] * over, sum[i + 1] * over));
    }
    sync_threads(2 + group, 128);
    for (int i = thread; i < 64 * HALVES * 8; i += 128) {
        const int at = group * 64 + i / (HALVES * 8), block = i % (HALVES * 8), packed = item.first + at;
        if (packed >= item.last) break;
        u32 x[4];
        load_shared(memory + block / 8 * QUERY_HALF + at * 128 + ((block % 8) ^ (at % 8)) * 16, x);
        u16* to = a.out + (item.token + packed / GROUP) * a.out_token + (head * GROUP + packed % GROUP) * a.out_head;
        store_global(to + block * 8, x);
    }
}

__device__ __forceinline__ void leave(const Arguments& a, const Item& item, int head, const float (&sum)[DIM / 2],
                                      const Rows& rows, int group, int thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = group * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
        if (item.first + row >= item.last) continue;
        const long long to = static_cast<long long>(item.partial + item.part * TILE + row) * KV_HEADS + head;
        if (thread % 4 == 0) a.extents[2 * to] = rows.phi[half], a.extents[2 * to + 1] = rows.total[half];
#pragma unroll
        for (int i = 0; i < DIM / 2; i += 4) {
            float* at = a.partial + to * DIM + 2 * i + thread % 4 * 2;
            at[0] = sum[i + 2 * half], at[1] = sum[i + 2 * half + 1];
        }
    }
}

__device__ __forceinline__ void add_parts(const Arguments& a, const Item& item, int head, int thread) {
    for (int i = thread; i < (item.last - item.first) * (DIM / 4); i += THREADS) {
        const int row = i / (DIM / 4), d = i % (DIM / 4) * 4, packed = item.first + row;
        const long long first = static_cast<long long>(item.partial + row) * KV_HEADS + head;
        const Part all = parts_at(a.partial, a.extents, first, TILE * KV_HEADS, item.parts, d);
        all.write(a.out + (item.token + packed / GROUP) * a.out_token + (head * GROUP + packed % GROUP) * a.out_head + d);
    }
}

__device__ __forceinline__ void compute_all(const Arguments& a, const Item& item, int head, u32 memory, Barriers& barriers,
                                            int thread_in_all) {
    const int group = thread_in_all / 128, thread = thread_in_all % 128, lane = thread % 32;
    const u32 stages = memory + QUERY_BYTES, queries = memory + group * 64 * 128;
    const int begin = item.begin / CHUNK * CHUNK, turns = (item.end - begin + TURN - 1) / TURN;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = item.first + group * 64 + thread / 32 * 16 + lane / 4 + 8 * half;
        rows.position[half] = item.start + row / GROUP;
        rows.phi[half] = LOWEST, rows.total[half] = 0.0f, rows.shrink[half] = 1.0f;
    }
    // The tokens that all of the warpgroup's rows see.
    const int least = item.start + (item.first + group * 64) / GROUP + 1, seen = least < item.end ? least : item.end;
    float s[TURN / 2], sum[DIM / 2];
    u32 weights[TURN / 16][4];
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) sum[i] = 0.0f;
    barrier_wait(shared_address(&barriers.queries), 0);
    barrier_wait(shared_address(&barriers.keys[0]), 0);
    products_begin();
    ask_scores(s, queries, stages);
    products_done<0>();
    products_used(s);
    if (lane == 0) barrier_arrive(shared_address(&barriers.keys_read[0]));
    weigh(s, rows, item, begin, begin < item.begin || begin + TURN > seen, true, a.scale, lane);
    pack(s, weights);
    for (int turn = 1; turn < turns; ++turn) {
        const int now = turn % STAGES, before = (turn - 1) % STAGES, at = begin + turn * TURN;
        barrier_wait(shared_address(&barriers.keys[now]), turn / STAGES & 1);
        products_begin();
        ask_scores(s, queries, stages + now * STAGE_BYTES);
        barrier_wait(shared_address(&barriers.values[before]), (turn - 1) / STAGES & 1);
        ask_sums(sum, weights, stages + before * STAGE_BYTES + KEY_BYTES);
        products_done<1>();
        products_used(s);
        if (lane == 0) barrier_arrive(shared_address(&barriers.keys_read[now]));
        weigh(s, rows, item, at, at + TURN > seen, false, a.scale, lane);
        products_done<0>();
        products_used(sum);
        if (lane == 0) barrier_arrive(shared_address(&barriers.values_read[before]));
        if (rows.moved) shrink(sum, rows);
        pack(s, weights);
    }
    const int last = (turns - 1) % STAGES, from = item.end - (begin + (turns - 1) * TURN);
    const u32 values = stages + last * STAGE_BYTES + KEY_BYTES;
    barrier_wait(shared_address(&barriers.values[last]), (turns - 1) / STAGES & 1);
    if (from < TURN) clear_values(values, from, group, thread);
    products_begin();
    ask_sums(sum, weights, values);
    products_done<0>();
    products_used(sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.total[half] += __shfl_xor_sync(~0u, rows.total[half], 1);
        rows.total[half] += __shfl_xor_sync(~0u, rows.total[half], 2);
    }
    if (item.parts == 1) {
        write(a, item, head, sum, rows, memory, group, thread);
        return;
    }
    leave(a, item, head, sum, rows, group, thread);
    __threadfence();
    sync_threads(1, THREADS);
    int* counter = a.counters + item.counter * KV_HEADS + head;
    if (thread_in_all == 0) barriers.arrived = atomicAdd(counter, 1) + 1;
    sync_threads(1, THREADS);
    if (barriers.arrived != item.parts) return;
    __threadfence();
    if (thread_in_all == 0) *counter = 0;
    add_parts(a, item, head, thread_in_all);
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
    prompt_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                     const __grid_constant__ TensorMap values, const __grid_constant__ Arguments arguments) {
    const u32 base = shared_address(shared_memory()), memory = (base + 1023) & ~1023u;
    Barriers& barriers =
        *reinterpret_cast<Barriers*>(shared_memory() + (memory - base) + QUERY_BYTES + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barriers.queries), 1);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared_address(&barriers.keys[s]), 1);
            barrier_init(shared_address(&barriers.values[s]), 1);
            barrier_init(shared_address(&barriers.keys_read[s]), THREADS / 32);
            barrier_init(shared_address(&barriers.values_read[s]), THREADS / 32);
        }
        barriers_made();
    }
    __syncthreads();
    // Narrow items stand first in the list. A launch of which nobody waits would let the next kernel overtake.
    const int narrow_items = arguments.meta[0], index = blockIdx.x, head = index % KV_HEADS;
    if (index >= arguments.meta[1] * KV_HEADS) {
        wait_for_kernel_in_front();
        return;
    }
    const Item item = item_at(arguments.meta, narrow_items + index / KV_HEADS);
    if (threadIdx.x >= THREADS) {
        fewer_registers<40>();
        if (threadIdx.x < THREADS + 32) {
            load_all(&queries, &keys, &values, arguments, item, head, memory, barriers, threadIdx.x - THREADS);
        }
    } else {
        more_registers<REGISTERS>();
        compute_all(arguments, item, head, memory, barriers, threadIdx.x);
    }
}
