// What kernels of Hopper are written with: its instructions as functions. BF16 (or float16) is set by the compiler's
// options. tests/ops/hopper_emulated.h has the same functions for a machine without a GPU.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#if BF16
#define KIND "bf16"
#else
#define KIND "f16"
#endif

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// How long the L2 cache keeps what is loaded.
constexpr u64 ONCE = 0x12F0000000000000ull, AGAIN = 0x14F0000000000000ull;

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ unsigned char memory[];
    return memory;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// -- blocks, clusters, grids -----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of another block's shared memory that corresponds to one of this block's.
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

// The kernel in front has ended, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel's blocks may start where there is room.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// All threads of a warpgroup at once.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// -- barriers that count arrivals and bytes --------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// What this thread has made of barriers is seen by the cluster and by the copy engine.
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// At a barrier of any block of the cluster. Of this block's scope: what it tells is that a stage has been read.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// -- the copy engine -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a matrix, for the blocks of the cluster in `mask` if it has SHARERS, else for this one.
template <int SHARERS>
__device__ __forceinline__ void load_box(const TensorMap* map, u32 to, u32 barrier, int column, int row, u32 mask, u64 keep) {
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

// A box of three dimensions, the innermost first.
__device__ __forceinline__ void load_box(const TensorMap* map, u32 to, u32 barrier, int c0, int c1, int c2, u64 keep) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(keep)
        : "memory");
}

// The same of five dimensions.
__device__ __forceinline__ void load_box(const TensorMap* map, u32 to, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Some bytes in a row; addresses and their number are multiples of 16.
__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// What this thread stored in shared memory comes before what the copy engine and the tensor cores do there next.
__device__ __forceinline__ void stores_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- memory ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_shared(u32 to, u32 a) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(a) : "memory");
}

__device__ __forceinline__ void clear_shared(u32 to) {  // 16 bytes
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

__device__ __forceinline__ void load_shared(u32 from, u32 (&x)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

__device__ __forceinline__ void load_shared(u32 from, float (&x)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from));
}

__device__ __forceinline__ void load_word(u32 from, u32& x) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
}

__device__ __forceinline__ void load_two(u32 from, u32 (&x)[2]) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from));
}

__device__ __forceinline__ void load_half(u32 from, u32& x) {
    u16 found;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(from));
    x = found;
}

__device__ __forceinline__ int load_byte(u32 from) {
    u32 x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(from));
    return static_cast<int>(x);
}

__device__ __forceinline__ void store_cluster(u32 to, const float* x) {  // four, in any block of the cluster
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

// 16 bytes that no kernel writes, and that are read once: the second cache gets whole lines, also where threads ask for halves.
__device__ __forceinline__ void load_once(const void* from, u32 (&x)[4]) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(from));
}

// What no kernel writes, and neighbours read, too.
__device__ __forceinline__ void load_kept(const u32* from, u32& x) { asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(from)); }

__device__ __forceinline__ void load_kept(const u16* from, u32& x) {
    u16 found;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(found) : "l"(from));
    x = found;
}

__device__ __forceinline__ void load_global(const void* from, u32 (&x)[4]) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(from)
                 : "memory");
}

__device__ __forceinline__ void load_global(const void* from, u32 (&x)[2]) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(from) : "memory");
}

__device__ __forceinline__ void store_global(void* to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

__device__ __forceinline__ void store_global(void* to, const u32 (&x)[2]) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x[0]), "r"(x[1]) : "memory");
}

__device__ __forceinline__ void store_global(void* to, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Written by another block: not from this one's cache.
__device__ __forceinline__ void from_others(const float* at, float& x, float& y) {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "l"(at));
}

__device__ __forceinline__ void from_others(const float* at, float (&x)[4]) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(at));
}

// -- memory that other devices write to --------------------------------------------------------------------------------

// 16 bytes, of which each 8 arrive whole.
__device__ __forceinline__ void store_far(void* to, const u32 (&x)[4]) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// What another device has written here: not from this block's cache.
__device__ __forceinline__ void load_far(const void* from, u32 (&x)[4]) {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(from)
                 : "memory");
}

// The first and third of four words at each of COUNT places but one, `apart` bytes from each other, once the others are
// `call`.
template <int COUNT>
__device__ __forceinline__ void wait_for_words(const unsigned char* at, u64 apart, u32 but, u32 call, u32 (&words)[COUNT][2]) {
    bool all;
    do {
        all = true;
        u32 x[COUNT][4];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i != but) load_far(at + i * apart, x[i]);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i == but) continue;
            all &= x[i][1] == call && x[i][3] == call;
            words[i][0] = x[i][0], words[i][1] = x[i][2];
        }
    } while (!all);
}

// All four words at each of COUNT places but one, `apart` bytes from each other, once none of them is zero; and `step`
// bytes further on, for `many` of MANY such rows of places.
template <int MANY, int COUNT>
__device__ __forceinline__ void wait_for_marked(const unsigned char* at, u64 apart, u32 but, u64 step, u32 many,
                                                u32 (&words)[MANY][COUNT][4]) {
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                if (i < many && r != but) load_far(at + i * step + r * apart, words[i][r]);
            }
        }
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                if (i < many && r != but) all &= words[i][r][0] && words[i][r][1] && words[i][r][2] && words[i][r][3];
            }
        }
    } while (!all);
}

// 16 bytes here that others will write to once they have heard from this device's next kernel.
__device__ __forceinline__ void clear_for_others(void* at) {
    asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(0) : "memory");
}

// Behind all that the block's threads have written before they met.
__device__ __forceinline__ void raise_flag(u32* at, u32 call) {
    asm volatile("fence.acq_rel.sys;\nst.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(call) : "memory");
}

__device__ __forceinline__ void wait_for_flag(const u32* at, u32 call) {
    u32 found;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
    } while (static_cast<int>(found - call) < 0);
}

// -- products of a warpgroup (`multiply_wide`, `multiply_turned`, `multiply_across` ask for them: Python writes these) ---

// A tile of rows of 128 bytes, swizzled: groups of eight rows lie 1,024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// The same with rows and columns exchanged: rows of 128 bytes are 64 columns, the next 64 lie `apart` bytes away.
__device__ __forceinline__ u64 descriptor_turned(u32 address, u32 apart) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(apart >> 4) << 16 | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_asked() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the last PENDING groups of products are done.
template <int PENDING>
__device__ __forceinline__ void products_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// From here on the compiler may use the sums.
template <int COUNT>
__device__ __forceinline__ void products_used(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// -- products of a warp ----------------------------------------------------------------------------------------------

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_turned(u32 (&a)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}

// An 8 x 8 matrix, two elements a lane, rows for columns.
__device__ __forceinline__ u32 turned(u32 pair) {
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
}

// sum += a b with a [16, 16] and b [16, 8].
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum = a b.
__device__ __forceinline__ void multiply_first(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                 : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// sum += a b of float16, whatever KIND is.
__device__ __forceinline__ void multiply_halves(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum = a b of float16.
__device__ __forceinline__ void multiply_halves_first(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// The same of e4m3 with a [16, 32] and b [32, 8]: a register has four columns of a row, and of b four rows of a column.
__device__ __forceinline__ void multiply_bytes(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of int8.
__device__ __forceinline__ void multiply_bytes(int (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// -- numbers ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 two(float low, float high) {
    u32 both;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u16 narrow(float value) { return static_cast<u16>(two(value, 0.0f)); }

// From the second cache: the first may have what was there before another kernel wrote, where nobody has waited for it.
__device__ __forceinline__ u16 written(const u16* x) {
    u16 bits;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(x));
    return bits;
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

__device__ __forceinline__ u32 two_halves(float low, float high) {  // float16, whatever KIND is
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float of_half(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
    return value;
}

__device__ __forceinline__ int nearest(float value) {
    int whole;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole) : "f"(value));
    return whole;
}

__device__ __forceinline__ u32 two_codes(float low, float high) {  // e4m3, 448 for all beyond
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// The lower two of four e4m3 codes as float16, which has all of them; the upper two.
__device__ __forceinline__ u32 halves_below(u32 codes) {
    u32 both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(both) : "r"(codes));
    return both;
}

__device__ __forceinline__ u32 halves_above(u32 codes) {
    u32 both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(both) : "r"(codes));
    return both;
}

// The largest of a warp.
__device__ __forceinline__ u32 most_in_warp(u32 x) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x));
    return most;
}

// Bits of `x` where `mask` has them, and those of `more`: one instruction, where the compiler would take two.
__device__ __forceinline__ u32 masked_with(u32 x, u32 mask, u32 more) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(x), "r"(mask), "r"(more));
    return bits;
}

// The larger of two pairs of whole numbers without signs.
__device__ __forceinline__ u32 larger_two(u32 a, u32 b) {
    u32 most;
    asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

// Four bytes, for each of which `which` has four bits: 0 to 3 for those of a, 4 to 7 for those of b.
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// Two sums, each rounded.
__device__ __forceinline__ u32 add_two(u32 a, u32 b) {
    u32 sum;
    asm("add.rn." KIND "x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// Two products, each rounded; two products and sums, rounded once.
__device__ __forceinline__ u32 multiply_two(u32 a, u32 b) {
    u32 product;
    asm("mul.rn." KIND "x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 multiply_add_two(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn." KIND "x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

__device__ __forceinline__ u32 multiply_add_halves(u32 a, u32 b, u32 c) {  // float16, whatever KIND is
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float divided(float x, float by) {  // as Triton divides: within 2 units of the last place
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(by));
    return y;
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
