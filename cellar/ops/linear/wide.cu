// Products of up to some thousand rows on Hopper: out[m, n] = x[m, k] w[n, k]^T (+ bias), or silu(gate) * up of the two
// halves of w.
//
// One warp asks the copy engine for tiles, the others multiply them and write. A cluster of CM x CN x CK blocks shares
// what it loads: blocks of the same rows of x share x, blocks of the same rows of w share w. Of the CK parts of one sum
// each block adds up some rows, which the others send to its shared memory. Widths (BN) need not be powers of two, so
// that tiles can be as many as there are multiprocessors.
//
// Set by the compiler's options: TM rows of x (64, 128, 192), BN rows of w, STAGES in flight, CM, CN, CK, GATED, HAS_BIAS,
// PERSIST (a block goes on with the next tile while the last one is written), BF16 (else float16).

constexpr int GROUPS = TM / 64;          // warpgroups that multiply, 64 rows of x each
constexpr int MULTIPLIERS = GROUPS * 4;  // their warps
constexpr int CLUSTER = CM * CN * CK;
constexpr int DEPTH = 64;                // columns of a stage: one row of 128 bytes, swizzled
constexpr u32 X_BYTES = TM * DEPTH * 2;
constexpr u32 W_BYTES = BN * DEPTH * 2;
constexpr u32 STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int HALVES = GATED ? 2 : 1;
constexpr int X_ROWS = TM / CN;                        // of one load of x
constexpr int W_ROWS = BN / HALVES / CM;               // of one load of w
constexpr int COLUMNS = BN / HALVES;                   // of a tile of the result
constexpr int PIECE = PERSIST && COLUMNS > 64 ? 64 : COLUMNS;  // of those, written at a time
constexpr int PITCH = PIECE + 8;                       // of a row in shared memory: no two rows on the same banks
constexpr int OWNED = MULTIPLIERS / CK;                // warps whose rows a block adds up
constexpr u32 PART_BYTES = 16 * BN * 4;                // a warp's rows of another part

static_assert(TM == 64 || TM == 128 || TM == 192);
static_assert(BN % (8 * HALVES * CM) == 0 && BN <= 256 && X_ROWS % 8 == 0);
static_assert(CK == 1 || (!PERSIST && !GATED));
static_assert(MULTIPLIERS % CK == 0);

struct Task {
    const TensorMap* xs;
    const TensorMap* ws;
    const u16* bias;
    u16* out;
    int m, n;
    int down, clusters;               // clusters below one another, and in all
    int rm, rn, rk;                   // this block's place in its cluster
    int first_step, steps;            // its part of the sum
    bool early;                       // whether the next kernel's blocks may start where there is room
    u32 full, empty, stages, staged;  // barriers, stages, and where results wait to be written
};

struct Tile {
    int row, column;  // the first of the result's
};

// Clusters down the rows of x first: they read the same weights, once from memory.
__device__ __forceinline__ Tile tile_of(const Task& task, int cluster) {
    return {((cluster % task.down) * CM + task.rm) * TM, ((cluster / task.down) * CN + task.rn) * COLUMNS};
}

__device__ __forceinline__ u32 rank_of(int rm, int rn, int rk) { return (rk * CN + rn) * CM + rm; }

// -- the thread that loads -------------------------------------------------------------------------------------------

struct Sharers {
    u32 x, w;  // a bit for each block that has the same rows of x, of w
};

__device__ __forceinline__ Sharers sharers(const Task& task) {
    Sharers found = {0, 0};
    for (int i = 0; i < CN; ++i) found.x |= 1u << rank_of(task.rm, i, task.rk);
    for (int i = 0; i < CM; ++i) found.w |= 1u << rank_of(i, task.rn, task.rk);
    return found;
}

__device__ __forceinline__ void load_x(const Task& task, Tile tile, int step, u32 s, u32 mask) {
    const u32 to = task.stages + s * STAGE_BYTES + task.rn * X_ROWS * 128;
    load_box<CN>(task.xs, to, task.full + 8 * s, (task.first_step + step) * DEPTH, tile.row + task.rn * X_ROWS, mask, AGAIN);
}

__device__ __forceinline__ void load_w(const Task& task, Tile tile, int step, u32 s, u32 mask) {
    const u64 keep = task.down > 1 ? AGAIN : ONCE;
    for (int half = 0; half < HALVES; ++half) {
        const u32 to = task.stages + s * STAGE_BYTES + X_BYTES + (half * COLUMNS + task.rm * W_ROWS) * 128;
        const int row = half * task.n + tile.column + task.rm * W_ROWS;
        load_box<CM>(task.ws, to, task.full + 8 * s, (task.first_step + step) * DEPTH, row, mask, keep);
    }
}

__device__ __forceinline__ void load_all(const Task& task, int first, int stride) {
    const Sharers with = sharers(task);
    u32 at = 0;  // loads so far
    for (int cluster = first; cluster < task.clusters; cluster += stride) {
        const Tile tile = tile_of(task, cluster);
        int step = 0;
        if (cluster == first) {
            // Weights depend on nothing: they are asked for before the kernel in front is done.
            for (; step < task.steps && step < STAGES; ++step) {
                barrier_expect(task.full + 8 * step, STAGE_BYTES);
                load_w(task, tile, step, step, with.w);
            }
            wait_for_kernel_in_front();
            for (; at < step; ++at) load_x(task, tile, at, at, with.x);
        }
        for (; step < task.steps; ++step, ++at) {
            const u32 s = at % STAGES;
            if (at >= STAGES) barrier_wait(task.empty + 8 * s, (at / STAGES - 1) & 1);
            barrier_expect(task.full + 8 * s, STAGE_BYTES);
            load_w(task, tile, step, s, with.w);
            load_x(task, tile, step, s, with.x);
        }
    }
    if (task.early) let_next_kernel_start();
}

// -- the warps that multiply -----------------------------------------------------------------------------------------

__device__ __forceinline__ float gated(float gate, float up) { return gate * up * reciprocal(1.0f + __expf(-gate)); }

// Two neighbours of the result, of which `sum` has the products: with bias, and gated if there is a gate.
__device__ __forceinline__ u32 result(const Task& task, const float (&sum)[BN / 2], int at, int column) {
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        v[i] = sum[at + i];
        if (HAS_BIAS && column < task.n) v[i] += one(task.bias[column + i]);
        if constexpr (GATED) {
            float up = sum[at + i + COLUMNS / 2];
            if (HAS_BIAS && column < task.n) up += one(task.bias[task.n + column + i]);
            v[i] = gated(v[i], up);
        }
    }
    return two(v[0], v[1]);
}

__device__ __forceinline__ void write_chunk(const Task& task, Tile tile, int row, int column, u32 from) {
    if (column >= COLUMNS || tile.row + row >= task.m || tile.column + column >= task.n) return;
    u32 x[4];
    load_shared(from, x);
    store_global(task.out + static_cast<u64>(tile.row + row) * task.n + tile.column + column, x);
}

// A warp's 16 rows of a tile, through shared memory of its own, where they get into order: 16 bytes a lane.
__device__ __forceinline__ void write(const Task& task, Tile tile, const float (&sum)[BN / 2], int warp, u32 staged, int lane) {
    const int row = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int piece = 0; piece < COLUMNS; piece += PIECE) {
        if (PERSIST || piece) __syncwarp();  // what was here before has been read
#pragma unroll
        for (int j = 0; j < PIECE / 8; ++j) {
            const int column = piece + 8 * j;
            if (column >= COLUMNS) break;
            const u32 to = staged + (row * PITCH + 8 * j + pair) * 2;
            store_shared(to, result(task, sum, column / 2, tile.column + column + pair));
            store_shared(to + 8 * PITCH * 2, result(task, sum, column / 2 + 2, tile.column + column + pair));
        }
        __syncwarp();
#pragma unroll
        for (int at = lane; at < PIECE * 2; at += 32) {
            const int below = at / (PIECE / 8), beside = at % (PIECE / 8) * 8;
            write_chunk(task, tile, warp * 16 + below, piece + beside, staged + (below * PITCH + beside) * 2);
        }
    }
}

// Parts of other blocks lie as [part][warp][four sums][lane]: a block's own is left out.
__device__ __forceinline__ u32 part_at(const Task& task, int part, int owner, int warp, int lane) {
    return task.staged + ((part - (part > owner)) * OWNED + warp) * PART_BYTES + lane * 16;
}

__device__ __forceinline__ void send(const Task& task, const float (&sum)[BN / 2], int warp, int lane) {
    const int owner = warp / OWNED;
    if (owner == task.rk) return;
    const u32 to = in_block(part_at(task, task.rk, owner, warp % OWNED, lane), rank_of(task.rm, task.rn, owner));
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) store_cluster(to + j * 512, sum + 4 * j);
}

__device__ __forceinline__ void receive(const Task& task, float (&sum)[BN / 2], int warp, int lane) {
#pragma unroll
    for (int part = 0; part < CK; ++part) {
        if (part == task.rk) continue;
        const u32 from = part_at(task, part, task.rk, warp, lane);
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            float x[4];
            load_shared(from + j * 512, x);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[4 * j + i] += x[i];
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void multiply_all(const Task& task, int first, int stride) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
    // A stage goes back to every block that loads into it: lanes 0 .. CN - 1 tell those of x, the next those of w.
    const bool tells = lane < CN + CM - 1;
    u32 owner = rank_of(task.rm, lane % CN, task.rk);
    if (lane >= CN && tells) owner = rank_of(lane - CN + (lane - CN >= task.rm), task.rn, task.rk);
    u32 at = 0;
    for (int cluster = first; cluster < task.clusters; cluster += stride) {
        float sum[BN / 2];
        for (int step = 0; step < task.steps; ++step, ++at) {
            const u32 s = at % STAGES;
            barrier_wait(task.full + 8 * s, at / STAGES & 1);
            const u64 a = descriptor(task.stages + s * STAGE_BYTES + group * 64 * 128);
            const u64 b = descriptor(task.stages + s * STAGE_BYTES + X_BYTES);
            products_begin();
#pragma unroll
            for (int part = 0; part < 4; ++part) multiply_wide(sum, a + 2 * part, b + 2 * part, step > 0 || part > 0);
            products_asked();
            if (step > 0) {
                products_done<1>();
                if (tells) barrier_arrive(in_block(task.empty + 8 * ((at - 1) % STAGES), owner));
            }
        }
        products_done<0>();
        products_used(sum);
        if (tells) barrier_arrive(in_block(task.empty + 8 * ((at - 1) % STAGES), owner));
        const Tile tile = tile_of(task, cluster);
        if constexpr (CK == 1) {
            if constexpr (!PERSIST) sync_threads(1, MULTIPLIERS * 32);  // the stages are memory to write in now
            write(task, tile, sum, warp, task.staged + warp * 16 * PITCH * 2, lane);
        } else {
            send(task, sum, warp, lane);
            cluster_sync<true>();  // what others sent is there
            if (warp / OWNED == task.rk) {
                receive(task, sum, warp % OWNED, lane);
                // Of this warp's, the first part has been added.
                write(task, tile, sum, warp, task.staged + warp % OWNED * PART_BYTES, lane);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS * 32 + 32, 1)
    product(const __grid_constant__ TensorMap xs, const __grid_constant__ TensorMap ws, const u16* bias, u16* out, int m, int n,
            int steps, int down, int clusters) {
    const u32 rank = rank_in_cluster();
    Task task = {&xs, &ws, bias, out, m, n, down, clusters};
    task.rm = rank % CM, task.rn = rank / CM % CN, task.rk = rank / (CM * CN);
    // Behind what makes rows wider there is attention or a product, whose blocks fill a multiprocessor. Smaller blocks, as
    // those of a norm, would gather on the multiprocessors that are free first.
    task.early = GATED || n > steps * DEPTH;
    task.first_step = steps * task.rk / CK, task.steps = steps * (task.rk + 1) / CK - task.first_step;
    task.full = shared_address(shared_memory()), task.empty = task.full + 8 * STAGES;
    task.stages = (task.empty + 8 * STAGES + 1023) & ~1023u;
    task.staged = task.stages + (PERSIST || CK > 1 ? STAGES * STAGE_BYTES : 0);
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(task.full + 8 * s, 1);
            barrier_init(task.empty + 8 * s, (CM + CN - 1) * MULTIPLIERS);
        }
        barriers_made();
        prefetch(&xs);
        prefetch(&ws);
    }
    if constexpr (CLUSTER > 1) {
        cluster_sync<false>();
    } else {
        __syncthreads();
    }
    if (threadIdx.x >= MULTIPLIERS * 32) {
        if (threadIdx.x == MULTIPLIERS * 32) load_all(task, first, stride);
        __syncwarp();
        if constexpr (CK > 1) cluster_sync<true>();
    } else {
        multiply_all(task, first, stride);
    }
    // Nobody leaves while others may still reach its memory. (Of parts, all have met after the last of it.)
    if constexpr (CLUSTER > 1 && CK == 1) cluster_sync<false>();
}
