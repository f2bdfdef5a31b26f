// Attention of decodes on Hopper: few blocks work through the list (plan.py), each taking the next item when it has
// loaded one. One warp loads K and V by the copy engine without a pause between items, the others compute. Rotary
// embedding and the write of the new K and V are inside, as in `decode_attention`.
//
// Tokens are the tall operand: S^T = K Q^T and O^T = V^T P^T, so that a group of up to eight heads fills an instruction.
// Weights are 2^(s - phi) with a reference phi that a warp takes from the first tokens it sees of an item; only where a
// score exceeds it by more than 8 does it move (FlashDecoding++ §3: no maximum to be agreed on at every step).
//
// `decode.cuh` has what stands in front; `decode_plain.cuh`, or `decode_codes.cuh` with `decode_fp8.cuh` or
// `decode_int4.cuh`, loads stages, prepares queries and the newest K and V, and adds tokens up.

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
    if (!a.k && !a.beside) wait_for_kernel_in_front();  // it wrote what is loaded
    // There are no more blocks than the list has room for, so that the first one is read before it is known to count.
    int mine = a.meta[HEADER + blockIdx.x / KV_HEADS * FIELDS + lane % FIELDS];
    const int count = a.meta[0] * KV_HEADS;
    u32 at = 0, items = 0;
    for (int index = blockIdx.x;; ++items) {
        const bool end_of_list = index >= count;
        const int head = end_of_list ? -1 : index % KV_HEADS;
        if (items > 0 && !end_of_list) mine = a.meta[HEADER + index / KV_HEADS * FIELDS + lane % FIELDS];
        if (end_of_list || lane == FIELDS - 1) mine = head;
        if (items >= 2) barrier_wait(heard + 8 * (items % 2), (items / 2 - 1) & 1);
        if (lane < FIELDS) shared.items[items % 2][lane] = mine;
        __syncwarp();
        if (lane == 0) barrier_arrive(told + 8 * (items % 2));
        if (end_of_list) break;
        int next = 0;
        if (lane == 0) next = claim(a, count);  // comes while this item is loaded
        const int row = __shfl_sync(~0u, mine, 0), start = __shfl_sync(~0u, mine, 4), first = __shfl_sync(~0u, mine, 5);
        const int last = __shfl_sync(~0u, mine, 6), stop = a.k && start < last ? start : last;
        const int begin = first / CHUNK, end = stop > first ? (stop - 1) / CHUNK + 1 : begin;
        load_chunks(keys, values, a, stages, full, empty, row, head, begin, end, at, lane);
        index = __shfl_sync(~0u, next, 0);
    }
    if (a.early) let_next_kernel_start();
}

// -- the warps that compute ------------------------------------------------------------------------------------------

// The warps' sums and the newest position as one, into the result, or for an item of several parts into the scratch,
// where who comes last adds up all.
__device__ __forceinline__ void finish(const Arguments& a, const Item& item, Shared& shared, int thread) {
    const bool whole = item.parts == 1;
    u16* out = a.out + item.token * a.out_token + item.head * GROUP * a.out_head;
    for (int i = thread; i < GROUP * DIM / 4; i += THREADS) {
        const int g = i / (DIM / 4), d = i % (DIM / 4) * 4;
        const Part all = of_block(shared, item.newest, g, d);
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
    for (int i = thread; i < 8 * Q_PITCH; i += THREADS) shared.queries[i / Q_PITCH][i % Q_PITCH] = 0;
    if (!a.beside) wait_for_kernel_in_front();
    u32 at = 0;
    for (u32 items = 0;; ++items) {
        barrier_wait(told + 8 * (items % 2), items / 2 & 1);
        const int* f = shared.items[items % 2];
        Item item = {f[0], f[1], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[FIELDS - 1]};
        item.newest = a.k && item.last > item.start;
        item.stop = item.newest ? item.start : item.last;
        __syncwarp();
        if (lane == 0) barrier_arrive(heard + 8 * (items % 2));
        if (item.head < 0) break;
        sync_computing();  // of the item before nobody needs anything any more
        prepare(a, item, shared, thread);
        sync_computing();
        if (item.newest) score_newest(a, shared, warp, lane);
        const Queries q = queries_of(a, shared, lane);
        Sums sums = {};
        sums.phi[0] = sums.phi[1] = LOWEST;
        sums.none = true;
        const bool none = item.first >= item.stop;
        const int first = item.first / CHUNK, turns = none ? 0 : turns_of((item.stop - 1) / CHUNK + 1 - first);
        for (int turn = first * CHUNK; turn < first * CHUNK + turns * TURN; turn += TURN, ++at) {
            if (at % TEAMS != team) continue;
            const u32 s = at % STAGES;
            const int low = item.first - (turn + tile * OWN), high = item.stop - (turn + tile * OWN);
            barrier_wait(full + 8 * s, at / STAGES & 1);
            if (low < OWN && high > 0) add_own(sums, q, stages, s, tile, low, high, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * s);
        }
        put(sums, shared, warp, lane);
        sync_computing();
        finish(a, item, shared, thread);
    }
    if (a.beside) wait_for_kernel_in_front();
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, AT_ONCE)
    decode_attention(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                     const __grid_constant__ Arguments arguments) {
    unsigned char* memory = shared_memory();
    const u32 stages = (shared_address(memory) + 1023) & ~1023u;
    Shared& shared = *reinterpret_cast<Shared*>(memory + (stages - shared_address(memory)) + ALL_STAGES);
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
