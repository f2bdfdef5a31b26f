// Attention of a few decodes on Hopper: the blocks of a cluster share the context of one token and KV head, and add up what
// they found through each other's shared memory. With few tokens such a kernel is a chain of waits for memory, not its
// bytes: here nobody looks for the next item, and no part goes through memory to whoever comes last, as in `decode.cu`.
//
// Set by the compiler's options beside those of `decode.cuh`: CLUSTER blocks of a cluster.

constexpr int SLOTS = GROUP * DIM / 4, OWN_SLOTS = SLOTS / CLUSTER;  // four dimensions of a query; those a block adds up

static_assert(TEAMS == 1 && SLOTS % CLUSTER == 0);

struct Found {  // by each block of the cluster, of this one's slots
    alignas(16) float sums[CLUSTER][OWN_SLOTS][4];
    alignas(16) float extents[CLUSTER][OWN_SLOTS][4];  // reference and sum of weights
};

__device__ __forceinline__ void compute_own(const Arguments& a, const Item& item, int end, u32 stages, Shared& shared, Found& found,
                                            u32 rank, int thread) {
    const int warp = thread / 32, lane = thread % 32;
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    for (int i = thread; i < 8 * Q_PITCH; i += THREADS) shared.queries[i / Q_PITCH][i % Q_PITCH] = 0;
    wait_for_kernel_in_front();
    sync_computing();
    prepare(a, item, shared, thread);
    sync_computing();
    if (item.newest) score_newest(a, shared, warp, lane);
    const Queries q = queries_of(a, shared, lane);
    Sums sums = {};
    sums.phi[0] = sums.phi[1] = LOWEST;
    sums.none = true;
    u32 at = 0;
    for (int turn = item.first; turn < end; turn += TURN, ++at) {
        const u32 s = at % STAGES;
        const int low = item.first - (turn + warp * OWN), high = item.stop - (turn + warp * OWN);
        barrier_wait(full + 8 * s, at / STAGES & 1);
        if (high > 0) add_own(sums, q, stages, s, warp, low, high, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * s);
    }
    put(sums, shared, warp, lane);
    sync_computing();
    for (int i = thread; i < SLOTS; i += THREADS) {
        const Part part = of_block(shared, item.newest, i / (DIM / 4), i % (DIM / 4) * 4);
        const float extent[4] = {part.top, part.total, 0.0f, 0.0f};
        const int owner = i / OWN_SLOTS, slot = i % OWN_SLOTS;
        store_cluster(in_block(shared_address(&found.sums[rank][slot]), owner), part.sum);
        store_cluster(in_block(shared_address(&found.extents[rank][slot]), owner), extent);
    }
}

// What all blocks found, always in their order.
__device__ __forceinline__ void add_up(const Arguments& a, const Item& item, const Found& found, u32 rank, int slot) {
    Part all = {LOWEST};
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
        Part one = {found.extents[i][slot][0], found.extents[i][slot][1]};
        load_shared(shared_address(&found.sums[i][slot]), one.sum);
        all.add(one);
    }
    const int place = rank * OWN_SLOTS + slot, g = place / (DIM / 4), d = place % (DIM / 4) * 4;
    all.write(a.out + item.token * a.out_token + (item.head * GROUP + g) * a.out_head + d);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, AT_ONCE)
    decode_attention_of_few(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                            const __grid_constant__ Arguments arguments) {
    unsigned char* memory = shared_memory();
    const u32 stages = (shared_address(memory) + 1023) & ~1023u;
    Shared& shared = *reinterpret_cast<Shared*>(memory + (stages - shared_address(memory)) + ALL_STAGES);
    Found& found = *reinterpret_cast<Found*>(&shared + 1);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(shared_address(&shared.full[s]), 1);
            barrier_init(shared_address(&shared.empty[s]), 4);
        }
        barriers_made();
        prefetch(&keys);
        prefetch(&values);
    }
    __syncthreads();
    cluster_sync<false>();  // nobody sends before all are there
    const u32 rank = rank_in_cluster();
    const int pair = blockIdx.x / CLUSTER, token = pair / KV_HEADS, head = pair % KV_HEADS;
    const int row = arguments.meta[2 + 2 * token] - 1, start = arguments.meta[3 + 2 * token];
    if (row < 0) {  // padding; so it is for the whole cluster
        wait_for_kernel_in_front();  // or the next kernel might begin before the one in front of this has ended
        return;
    }
    const int turns = (start + TURN - 1) / TURN;
    const int begin = turns * rank / CLUSTER * TURN, end = turns * (rank + 1) / CLUSTER * TURN;
    const int stop = end < start ? end : start;
    const int last = rank == CLUSTER - 1 ? start + 1 : stop;
    const Item item = {row, token, start, begin, last, 0, 0, 0, 0, head, stop, last > start};
    if (threadIdx.x < THREADS) {
        compute_own(arguments, item, end, stages, shared, found, rank, threadIdx.x);
    } else {
        u32 at = 0;
        const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
        const int chunks = (stop + CHUNK - 1) / CHUNK, lane = threadIdx.x - THREADS;
        load_chunks(&keys, &values, arguments, stages, full, empty, row, head, begin / CHUNK, chunks, at, lane);
        if (arguments.early) let_next_kernel_start();
    }
    cluster_sync<true>();
    if (threadIdx.x < OWN_SLOTS) add_up(arguments, item, found, rank, threadIdx.x);
}
