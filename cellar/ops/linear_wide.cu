// Products of 1 to 256 rows on Hopper: out[m, n] = x[m, k] w[n, k]^T (+ bias), or silu(gate) * up of the two halves of w.
//
// One warp asks the copy engine for tiles, the others multiply them (wgmma) and write. A cluster of CM x CN x CK blocks
// shares what it loads: blocks of the same rows of x share x, blocks of the same rows of w share w, and the CK parts of
// one sum are added through each other's shared memory. Widths (BN) need not be powers of two, so that tiles can be as
// many as there are multiprocessors.
//
// Set by the compiler's options: TM rows of x (64, 128), BN rows of w, STAGES in flight, CM, CN, CK, GATED, HAS_BIAS,
// PERSIST (a block goes on with the next tile while the last one is written), BF16 (else float16).

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int GROUPS = TM / 64;          // warpgroups that multiply, 64 rows of x each
constexpr int MULTIPLIERS = GROUPS * 4;  // their warps
constexpr int CLUSTER = CM * CN * CK;
constexpr int DEPTH = 64;                // columns of a stage: one row of 128 bytes, swizzled
constexpr u32 X_BYTES = TM * DEPTH * 2;
constexpr u32 W_BYTES = BN * DEPTH * 2;
constexpr u32 STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int X_ROWS = TM / CN;                        // of one load of x
constexpr int HALVES = GATED ? 2 : 1;
constexpr int W_ROWS = BN / HALVES / CM;               // of one load of w
constexpr int COLUMNS = BN / HALVES;                   // of a tile of the result
constexpr int PITCH = COLUMNS + 8;                     // of a staged row, elements: no two rows on the same banks
constexpr u64 ONCE = 0x12F0000000000000ull, AGAIN = 0x14F0000000000000ull;  // L2: evict first, evict last

static_assert(TM == 64 || TM == 128);
static_assert(BN % (8 * HALVES * CM) == 0 && BN <= 256 && X_ROWS % 8 == 0);
static_assert(CK == 1 || (!PERSIST && !GATED));
static_assert(TM % CK == 0);

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// All blocks of the cluster are there; what they wrote before is seen only if PUBLISH: that waits for all stores.
template <bool PUBLISH>
__device__ __forceinline__ void cluster_sync() {
    if constexpr (PUBLISH) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    }
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Of this block's scope, for what it tells is that the tensor cores have read a stage; nothing written is passed on.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, rank)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

template <int SHARERS>
__device__ __forceinline__ void load(const TensorMap* map, u32 to, u32 barrier, int column, int row, u32 mask, u64 keep) {
    if constexpr (SHARERS > 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
            " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<u16>(mask)), "l"(keep)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(keep)
            : "memory");
    }
}

// A tile of rows of 128 bytes, swizzled: groups of eight rows lie 1,024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 two(float low, float high) {
    u32 both;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ float one(u16 bits) {
#if BF16
    return __uint_as_float(static_cast<u32>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

struct Tile {
    int row, column;  // the first of the result's
};

// Clusters down the rows of x first: they read the same weights, once from memory.
__device__ __forceinline__ Tile tile_of(int cluster, int down, int rm, int rn) {
    return {((cluster % down) * CM + rm) * TM, ((cluster / down) * CN + rn) * COLUMNS};
}

// Rows of a warpgroup from shared memory to the result, 16 bytes a thread.
__device__ __forceinline__ void write_rows(u32 staged, u16* out, Tile tile, int first, int m, int n, int thread) {
    constexpr int CHUNKS = COLUMNS / 8;
    for (int i = thread; i < 64 * CHUNKS; i += 128) {
        const int row = i / CHUNKS, column = i % CHUNKS * 8;
        const int to_row = tile.row + first + row, to_column = tile.column + column;
        if (to_row < m && to_column < n) {
            u32 a, b, c, d;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                         : "r"(staged + (row * PITCH + column) * 2));
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + static_cast<u64>(to_row) * n + to_column),
                         "r"(a), "r"(b), "r"(c), "r"(d)
                         : "memory");
        }
    }
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS * 32 + 32, 1)
    product(const __grid_constant__ TensorMap xs, const __grid_constant__ TensorMap ws, const u16* __restrict__ bias,
            u16* __restrict__ out, int m, int n, int steps_in_all, int down, int clusters) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 stages = (shared_address(memory) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const u32 rank = rank_in_cluster();
    const int rm = rank % CM, rn = rank / CM % CN, rk = rank / (CM * CN);
    const int first_step = steps_in_all * rk / CK, steps = steps_in_all * (rk + 1) / CK - first_step;
    const int stride = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, (CM + CN - 1) * MULTIPLIERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&xs) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&ws) : "memory");
    }
    if constexpr (CLUSTER > 1) {
        cluster_sync<false>();
    } else {
        __syncthreads();
    }

    if (warp == MULTIPLIERS) {
        if (lane == 0) {
            // Who has the same rows of x (other rn), who of w (other rm).
            u32 with_x = 0, with_w = 0;
            for (int i = 0; i < CN; ++i) with_x |= 1u << ((rk * CN + i) * CM + rm);
            for (int i = 0; i < CM; ++i) with_w |= 1u << ((rk * CN + rn) * CM + i);
            u32 at = 0;  // loads so far
            bool waited = false;
            for (int cluster = blockIdx.x / CLUSTER; cluster < clusters; cluster += stride) {
                const Tile tile = tile_of(cluster, down, rm, rn);
                auto load_w = [&](int step, u32 s) {
                    for (int half = 0; half < HALVES; ++half) {
                        const u32 to = stages + s * STAGE_BYTES + X_BYTES + (half * COLUMNS + rm * W_ROWS) * 128;
                        load<CM>(&ws, to, full + 8 * s, (first_step + step) * DEPTH, half * n + tile.column + rm * W_ROWS,
                                 with_w, ONCE);
                    }
                };
                auto load_x = [&](int step, u32 s) {
                    const u32 to = stages + s * STAGE_BYTES + rn * X_ROWS * 128;
                    load<CN>(&xs, to, full + 8 * s, (first_step + step) * DEPTH, tile.row + rn * X_ROWS, with_x, AGAIN);
                };
                int step = 0;
                if (!waited) {  // weights depend on nothing: they are asked for before the kernel in front is done
                    const int ahead = steps < STAGES ? steps : STAGES;
                    for (; step < ahead; ++step) {
                        barrier_expect(full + 8 * step, STAGE_BYTES);
                        load_w(step, step);
                    }
                    asm volatile("griddepcontrol.wait;" ::: "memory");
                    for (int s = 0; s < ahead; ++s) load_x(s, s);
                    at = ahead;
                    waited = true;
                }
                for (; step < steps; ++step, ++at) {
                    const u32 s = at % STAGES;
                    if (at >= STAGES) barrier_wait(empty + 8 * s, (at / STAGES - 1) & 1);
                    barrier_expect(full + 8 * s, STAGE_BYTES);
                    load_w(step, s);
                    load_x(step, s);
                }
            }
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        }
        __syncwarp();
    } else {
        const int group = warp / 4, thread = threadIdx.x % 128;
        // A stage goes back to every block that loads into it: lanes 0 .. CN - 1 tell those of x, the next those of w.
        u32 owner = rank;
        const bool tells = lane < CN + CM - 1;
        if (lane < CN) {
            owner = (rk * CN + lane) * CM + rm;
        } else if (tells) {
            const int other = lane - CN + (lane - CN >= rm);
            owner = (rk * CN + rn) * CM + other;
        }
        u32 at = 0;
        for (int cluster = blockIdx.x / CLUSTER; cluster < clusters; cluster += stride) {
            const Tile tile = tile_of(cluster, down, rm, rn);
            float sum[BN / 2];
            for (int step = 0; step < steps; ++step, ++at) {
                const u32 s = at % STAGES;
                barrier_wait(full + 8 * s, at / STAGES & 1);
                const u64 a = descriptor(stages + s * STAGE_BYTES + group * 64 * 128);
                const u64 b = descriptor(stages + s * STAGE_BYTES + X_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int part = 0; part < 4; ++part) multiply(sum, a + 2 * part, b + 2 * part, step > 0 || part > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (step > 0) {
                    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    if (tells) barrier_arrive(empty + 8 * ((at - 1) % STAGES), owner);
                }
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(sum[i])::"memory");
            if (tells) barrier_arrive(empty + 8 * ((at - 1) % STAGES), owner);

            const int row = warp % 4 * 16 + lane / 4, pair = lane % 4 * 2;  // within the warpgroup's; and eight below
            if constexpr (CK == 1) {
                if constexpr (!PERSIST) sync_threads(1, MULTIPLIERS * 32);  // the stages are memory to write in now
                const u32 staged = stages + (PERSIST ? STAGES * STAGE_BYTES : 0) + group * 64 * PITCH * 2;
                if constexpr (PERSIST) sync_threads(2 + group, 128);  // the tile before has been written
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; ++j) {
                    float v[4];
                    const int column = tile.column + 8 * j + pair;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        v[i] = sum[4 * j + i];
                        if (HAS_BIAS && column < n) v[i] += one(bias[column + i % 2]);
                        if constexpr (GATED) {
                            float up = sum[4 * (j + COLUMNS / 8) + i];
                            if (HAS_BIAS && column < n) up += one(bias[n + column + i % 2]);
                            v[i] = gated(v[i], up);
                        }
                    }
                    const u32 to = staged + (row * PITCH + 8 * j + pair) * 2;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(two(v[0], v[1])) : "memory");
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 8 * PITCH * 2), "r"(two(v[2], v[3])) : "memory");
                }
                sync_threads(2 + group, 128);
                write_rows(staged, out, tile, group * 64, m, n, thread);
            } else {
                sync_threads(1, MULTIPLIERS * 32);
#pragma unroll
                for (int j = 0; j < BN / 8; ++j) {
                    const u32 to = stages + ((group * 64 + row) * PITCH + 8 * j + pair) * 4;
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(sum[4 * j]), "f"(sum[4 * j + 1]) : "memory");
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 8 * PITCH * 4), "f"(sum[4 * j + 2]),
                                 "f"(sum[4 * j + 3])
                                 : "memory");
                }
            }
        }
    }

    if constexpr (CK > 1) {
        cluster_sync<true>();  // all parts of the sum lie in shared memory
        const Tile tile = tile_of(blockIdx.x / CLUSTER, down, rm, rn);
        constexpr int ROWS = TM / CK, CHUNKS = BN / 8;
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += MULTIPLIERS * 32 + 32) {
            const int row = rk * ROWS + i / CHUNKS, column = i % CHUNKS * 8;
            if (tile.row + row >= m || tile.column + column >= n) continue;
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = HAS_BIAS ? one(bias[tile.column + column + j]) : 0.0f;
            const u32 from = stages + (row * PITCH + column) * 4;
#pragma unroll
            for (int part = 0; part < CK; ++part) {
                const u32 there = in_block(from, (part * CN + rn) * CM + rm);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float a, b, c, d;
                    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                                 : "r"(there + 16 * half));
                    v[4 * half] += a, v[4 * half + 1] += b, v[4 * half + 2] += c, v[4 * half + 3] += d;
                }
            }
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                             out + static_cast<u64>(tile.row + row) * n + tile.column + column),
                         "r"(two(v[0], v[1])), "r"(two(v[2], v[3])), "r"(two(v[4], v[5])), "r"(two(v[6], v[7]))
                         : "memory");
        }
    }
    if constexpr (CLUSTER > 1) cluster_sync<false>();  // nobody leaves while others may still reach its memory
}
