// Hopper's instructions for a machine without a GPU: the functions of cellar/ops/cuda/hopper.cuh, so that its kernels run as
// ordinary C++, each thread a fiber. It finds what is wrong with a kernel's logic: addresses, layouts of operands, who
// waits for whom. The copy engine takes any time it likes, tensor cores read as late as they may, the order of threads
// is random. If nobody can go on, the kernel has deadlocked, and the program says where.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {  // address, rank + 256 swizzle, five sizes, four strides (bytes), five sizes of the box
    u64 opaque[16];
};

constexpr u64 ONCE = 0, AGAIN = 0;
constexpr u32 SPAN = 1 << 18;  // of a block's shared memory; the block's rank stands above

namespace emulated {

struct Dim {
    u32 x;
};

struct Barrier {
    int count = 0, pending = 0;
    long long bytes = 0;
    u32 phase = 0;
    void check() {
        if (pending == 0 && bytes == 0) pending = count, ++phase;
    }
};

struct Meeting {  // of a fixed number of threads; the last to come does what they came for
    int arrived = 0, generation = 0;
    std::vector<void*> brought;
};

struct Products {
    u64 a, b;
    bool add;
    int columns;
    std::vector<void*> sums;
    std::vector<const u32*> rows;  // a thread's part of the first operand, if that is in registers
    bool turned;                   // whether rows of the second one are columns
};

struct Group {  // of four warps
    std::vector<std::vector<Products>> asked;
    std::vector<Products> open;
};

struct Block {
    u32 index, rank;
    std::vector<unsigned char> memory;
    std::unordered_map<u32, Barrier> barriers;
    std::unordered_map<int, Meeting> meetings;
    std::vector<Meeting> warps, quads;
    std::vector<Group> groups;
    long long far = 0;   // writes to other devices that are on their way
    long long late = 0;  // and to its own memory, for others, which a launch's end waits for
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Block* block;
    Dim thread;
    std::function<bool()> ready;  // none: it can go on
    const char* where = "";
    bool ended = false;
};

inline std::vector<Block> blocks;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<std::function<void()>> copies;  // on their way
inline Fiber* current;
inline ucontext_t scheduler;
inline std::mt19937 noise;
inline std::function<void()> kernel;
inline Dim grid;
inline Meeting cluster;
inline std::string failure;

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

inline void wait(const char* where, std::function<bool()> ready) {
    if (ready()) return;
    current->where = where;
    current->ready = std::move(ready);
    swapcontext(&current->context, &scheduler);
}

inline void meet(const char* where, Meeting& meeting, int threads, int place, void* mine,
                 const std::function<void(std::vector<void*>&)>& last) {
    meeting.brought.resize(threads);
    meeting.brought[place] = mine;
    const int generation = meeting.generation;
    if (++meeting.arrived == threads) {
        if (last) last(meeting.brought);
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    wait(where, [&meeting, generation] { return meeting.generation != generation; });
}

inline void in_warp(const char* where, void* mine, const std::function<void(std::vector<void*>&)>& last) {
    const u32 thread = current->thread.x;
    meet(where, current->block->warps[thread / 32], 32, thread % 32, mine, last);
}

inline void in_four_warps(const char* where, void* mine, const std::function<void(std::vector<void*>&)>& last) {
    const u32 thread = current->thread.x;
    meet(where, current->block->quads[thread / 128], 128, thread % 128, mine, last);
}

inline Block& block_of(u32 address) { return blocks.at(address / SPAN); }

inline unsigned char* bytes_at(u32 address, u32 size) {
    Block& block = block_of(address);
    const u32 offset = address % SPAN;
    if (offset + size > block.memory.size()) fail("outside of shared memory: " + std::to_string(offset));
    return block.memory.data() + offset;
}

inline void enter() {
    try {
        kernel();
    } catch (const std::exception& error) {
        failure = error.what();
    }
    current->ended = true;
    swapcontext(&current->context, &scheduler);
}

inline void run_cluster() {
    std::vector<u32> order(fibers.size());
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    u32 left = order.size();
    while (left) {
        bool moved = false;
        std::shuffle(order.begin(), order.end(), noise);
        for (u32 i : order) {
            Fiber& fiber = *fibers[i];
            if (fiber.ended || (fiber.ready && !fiber.ready())) continue;
            fiber.ready = nullptr;
            current = &fiber;
            moved = true;
            swapcontext(&scheduler, &fiber.context);
            left -= fiber.ended;
        }
        if (!copies.empty() && (!moved || noise() % 4 == 0)) {
            std::swap(copies[noise() % copies.size()], copies.back());
            const auto copy = std::move(copies.back());
            copies.pop_back();
            copy();
            moved = true;
        }
        if (!failure.empty()) fail(failure);
        if (!moved) {
            const auto stuck = std::find_if(fibers.begin(), fibers.end(), [](const auto& fiber) { return !fiber->ended; });
            fail("deadlock: thread " + std::to_string((*stuck)->thread.x) + " waits in " + (*stuck)->where);
        }
    }
    if (!copies.empty()) fail("blocks ended before their copies");
}

// Clusters one after another, in order; their blocks and threads side by side.
inline void launch(u32 blocks_in_all, u32 size, u32 threads, u32 shared, u32 seed, std::function<void()> body) {
    noise.seed(seed);
    failure.clear();
    copies.clear();
    kernel = std::move(body);
    grid.x = blocks_in_all;
    for (u32 first = 0; first < blocks_in_all; first += size) {
        blocks.clear();
        fibers.clear();
        cluster = Meeting();
        blocks.resize(size);
        for (u32 rank = 0; rank < size; ++rank) {
            Block& block = blocks[rank];
            block.index = first + rank, block.rank = rank;
            block.memory.assign(shared + 16, 0xFF);  // not numbers
            block.warps.resize((threads + 31) / 32);
            block.quads.resize((threads + 127) / 128);
            block.groups.resize((threads + 127) / 128);
            for (u32 thread = 0; thread < threads; ++thread) {
                auto fiber = std::make_unique<Fiber>();
                fiber->stack = std::make_unique<char[]>(1 << 16);
                fiber->block = &block;
                fiber->thread.x = thread;
                getcontext(&fiber->context);
                fiber->context.uc_stack.ss_sp = fiber->stack.get();
                fiber->context.uc_stack.ss_size = 1 << 16;
                fiber->context.uc_link = &scheduler;
                makecontext(&fiber->context, enter, 0);
                fibers.push_back(std::move(fiber));
            }
        }
        run_cluster();
    }
}

inline float number(u16 bits);

inline u32 swizzled(u32 address, u64 bytes = 128) { return address ^ (bytes ? (address >> 7 & (bytes / 16 - 1)) << 4 : 0); }

inline void copy_box(const TensorMap* map, u32 to, const int* at) {
    const u64* o = map->opaque;
    const int rank = static_cast<int>(o[1] % 256);
    const u64 swizzle = o[1] / 256;
    if (swizzle && o[11] * 2 != swizzle) fail("a box of other rows than the swizzle's");
    if (to % 128) fail("a box that is not on 128");
    long long box[5] = {1, 1, 1, 1, 1};
    for (int d = 0; d < rank; ++d) box[d] = static_cast<long long>(o[11 + d]);
    u32 offset = 0;
    for (int e = 0; e < box[4]; ++e)
        for (int d = 0; d < box[3]; ++d)
            for (int c = 0; c < box[2]; ++c)
                for (int b = 0; b < box[1]; ++b)
                    for (int a = 0; a < box[0]; ++a, offset += 2) {
                        const long long place[5] = {at[0] + a, at[1] + b, at[2] + c, at[3] + d, at[4] + e};
                        bool inside = true;
                        long long bytes = place[0] * 2;
                        for (int i = 0; i < rank; ++i) inside &= place[i] >= 0 && place[i] < static_cast<long long>(o[2 + i]);
                        for (int i = 1; i < rank; ++i) bytes += place[i] * static_cast<long long>(o[6 + i]);
                        u16 value = 0;
                        if (inside) std::memcpy(&value, reinterpret_cast<const char*>(o[0]) + bytes, 2);
                        std::memcpy(bytes_at(swizzled(to + offset, swizzle), 2), &value, 2);
                    }
}

inline u32 box_bytes(const TensorMap* map) {
    u32 bytes = 2;
    for (u64 d = 0; d < map->opaque[1] % 256; ++d) bytes *= static_cast<u32>(map->opaque[11 + d]);
    return bytes;
}

inline void arrive(u32 barrier, int arrivals, long long bytes) {
    auto& barriers = block_of(barrier).barriers;
    if (!barriers.count(barrier % SPAN)) fail("there is no barrier at " + std::to_string(barrier % SPAN));
    Barrier& one = barriers[barrier % SPAN];
    one.pending -= arrivals;
    one.bytes += bytes;
    if (one.pending < 0) fail("too many arrivals at " + std::to_string(barrier % SPAN));
    one.check();
}

inline void copy_later(const TensorMap* map, u32 to, u32 barrier, int rank, const std::vector<int>& at, u32 mask) {
    if (static_cast<int>(map->opaque[1] % 256) != rank) fail("an instruction of other dimensions than the tensor's");
    copies.push_back([=] {
        for (u32 rank = 0; rank < blocks.size(); ++rank) {
            if (!(mask >> rank & 1)) continue;
            copy_box(map, rank * SPAN + to % SPAN, at.data());
            arrive(rank * SPAN + barrier % SPAN, 0, -static_cast<long long>(box_bytes(map)));
        }
    });
}

inline void copy_bytes_later(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16) fail("bytes that are not on 16");
    copies.push_back([=] {
        std::memcpy(bytes_at(to, bytes), from, bytes);
        arrive(barrier, 0, -static_cast<long long>(bytes));
    });
}

inline float element(u64 tile, int row, int column) {  // of a swizzled tile, as a descriptor names it
    const u32 base = current->block->rank * SPAN + static_cast<u32>(tile & 0x3FFF) * 16;
    if ((tile >> 32 & 0x3FFF) != 64 || tile >> 62 != 1) fail("an odd descriptor");
    const u32 apart = static_cast<u32>(tile >> 16 & 0x3FFF) * 16;
    u16 bits;
    std::memcpy(&bits, bytes_at(swizzled(base + column / 64 * apart + row / 8 * 1024 + row % 8 * 128 + column % 64 * 2), 2), 2);
    return number(bits);
}

}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::Dim{emulated::current->block->index})
#define gridDim (emulated::grid)

inline void __syncwarp() { emulated::in_warp("__syncwarp", nullptr, nullptr); }
inline void __threadfence() {}
inline float __expf(float x) { return std::exp(x); }
inline int atomicAdd(int* at, int value) { return *at += value, *at - value; }
inline int atomicExch(int* at, int value) { return std::swap(*at, value), value; }

template <typename T>
T __shfl_xor_sync(u32, T value, int distance) {
    struct Mine {
        T value, other;
    } mine{value, 0};
    emulated::in_warp("__shfl_xor_sync", &mine, [distance](std::vector<void*>& all) {
        for (int lane = 0; lane < 32; ++lane) {
            static_cast<Mine*>(all[lane])->other = static_cast<Mine*>(all[lane ^ distance])->value;
        }
    });
    return mine.other;
}

inline int __shfl_sync(u32, int value, int from) {
    struct Mine {
        int value, from, other;
    } mine{value, from, 0};
    emulated::in_warp("__shfl_sync", &mine, [](std::vector<void*>& all) {
        for (void* lane : all) {
            Mine* one = static_cast<Mine*>(lane);
            one->other = static_cast<Mine*>(all[one->from])->value;
        }
    });
    return mine.other;
}

inline bool __any_sync(u32, bool value) {
    struct Mine {
        bool value, any;
    } mine{value, false};
    emulated::in_warp("__any_sync", &mine, [](std::vector<void*>& all) {
        bool any = false;
        for (void* lane : all) any |= static_cast<Mine*>(lane)->value;
        for (void* lane : all) static_cast<Mine*>(lane)->any = any;
    });
    return mine.any;
}

inline unsigned char* shared_memory() { return emulated::current->block->memory.data() + 16; }

inline u32 shared_address(const void* p) {
    const auto& block = *emulated::current->block;
    return block.rank * SPAN + static_cast<u32>(static_cast<const unsigned char*>(p) - block.memory.data());
}

inline u32 rank_in_cluster() { return emulated::current->block->rank; }
inline u32 in_block(u32 address, u32 rank) { return rank * SPAN + address % SPAN; }

template <bool>
inline void cluster_sync() {
    emulated::meet("cluster_sync", emulated::cluster, static_cast<int>(emulated::fibers.size()), 0, nullptr, nullptr);
}

inline void sync_threads(int barrier, int threads) {
    emulated::meet("sync_threads", emulated::current->block->meetings[barrier], threads, 0, nullptr, nullptr);
}

inline void __syncthreads() {
    sync_threads(0, static_cast<int>(emulated::fibers.size() / emulated::blocks.size()));
}

inline void wait_for_kernel_in_front() {}
inline void let_next_kernel_start() {}
template <int>
inline void fewer_registers() {}
template <int>
inline void more_registers() {}

inline void barrier_init(u32 barrier, u32 count) {
    auto& one = emulated::current->block->barriers[barrier % SPAN];
    one.count = one.pending = static_cast<int>(count);
}
inline void barriers_made() {}
inline void barrier_expect(u32 barrier, u32 bytes) { emulated::arrive(barrier, 1, bytes); }
inline void barrier_arrive(u32 barrier) { emulated::arrive(barrier, 1, 0); }
inline void barrier_wait(u32 barrier, u32 parity) {
    const emulated::Barrier& one = emulated::current->block->barriers.at(barrier % SPAN);
    emulated::wait("barrier_wait", [&one, parity] { return (one.phase & 1) != parity; });
}

inline void prefetch(const TensorMap*) {}

template <int SHARERS>
inline void load_box(const TensorMap* map, u32 to, u32 barrier, int column, int row, u32 mask, u64) {
    const u32 rank = emulated::current->block->rank;
    emulated::copy_later(map, to, barrier, 2, {column, row, 0, 0, 0}, SHARERS > 1 ? mask : 1u << rank);
}
inline void load_box(const TensorMap* map, u32 to, u32 barrier, int c0, int c1, int c2, u64) {
    emulated::copy_later(map, to, barrier, 3, {c0, c1, c2, 0, 0}, 1u << emulated::current->block->rank);
}
inline void load_box(const TensorMap* map, u32 to, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    emulated::copy_later(map, to, barrier, 5, {c0, c1, c2, c3, c4}, 1u << emulated::current->block->rank);
}
inline void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) { emulated::copy_bytes_later(to, from, bytes, barrier); }
inline void stores_before_copies() {}

inline void store_shared(u32 to, u32 a) { std::memcpy(emulated::bytes_at(to, 4), &a, 4); }
inline void clear_shared(u32 to) { std::memset(emulated::bytes_at(to, 16), 0, 16); }
inline void load_shared(u32 from, u32 (&x)[4]) { std::memcpy(x, emulated::bytes_at(from, 16), 16); }
inline void load_shared(u32 from, float (&x)[4]) { std::memcpy(x, emulated::bytes_at(from, 16), 16); }
inline void load_word(u32 from, u32& x) { std::memcpy(&x, emulated::bytes_at(from, 4), 4); }
inline void load_two(u32 from, u32 (&x)[2]) { std::memcpy(x, emulated::bytes_at(from, 8), 8); }
inline void load_half(u32 from, u32& x) { x = 0, std::memcpy(&x, emulated::bytes_at(from, 2), 2); }
inline int load_byte(u32 from) { return *emulated::bytes_at(from, 1); }
inline void store_cluster(u32 to, const float* x) { std::memcpy(emulated::bytes_at(to, 16), x, 16); }
inline void load_once(const void* from, u32 (&x)[4]) { std::memcpy(x, from, 16); }
inline void load_kept(const u32* from, u32& x) { x = *from; }
inline void load_kept(const u16* from, u32& x) { x = *from; }
inline void load_global(const void* from, u32 (&x)[4]) { std::memcpy(x, from, 16); }
inline void load_global(const void* from, u32 (&x)[2]) { std::memcpy(x, from, 8); }
inline void store_global(void* to, const u32 (&x)[4]) { std::memcpy(to, x, 16); }
inline void store_global(void* to, const u32 (&x)[2]) { std::memcpy(to, x, 8); }
inline void store_global(void* to, const float (&x)[4]) { std::memcpy(to, x, 16); }
inline void from_others(const float* at, float& x, float& y) { x = at[0], y = at[1]; }
inline void from_others(const float* at, float (&x)[4]) { std::memcpy(x, at, 16); }

// What goes to another device arrives at any time later, 8 bytes by 8 bytes, but before a flag that its block raises.
inline void store_far(void* to, const u32 (&x)[4]) {
    std::vector<u32> kept(x, x + 4);
    auto* block = emulated::current->block;
    for (int half = 0; half < 2; ++half) {
        ++block->far;
        emulated::copies.push_back([=] { std::memcpy(static_cast<u32*>(to) + 2 * half, kept.data() + 2 * half, 8), --block->far; });
    }
}
inline void load_far(const void* from, u32 (&x)[4]) { std::memcpy(x, from, 16); }
template <int COUNT>
inline void wait_for_words(const unsigned char* at, u64 apart, u32 but, u32 call, u32 (&words)[COUNT][2]) {
    const auto there = [=](u32 i) { return reinterpret_cast<const u32*>(at + i * apart); };
    for (u32 i = 0; i < COUNT; ++i) {
        if (i == but) continue;
        emulated::wait("wait_for_words", [=] { return there(i)[1] == call && there(i)[3] == call; });
        words[i][0] = there(i)[0], words[i][1] = there(i)[2];
    }
}
// When others see it is left open, but before the next launch.
inline void clear_for_others(void* at) {
    auto* block = emulated::current->block;
    ++block->late;
    emulated::copies.push_back([=] { std::memset(at, 0, 16), --block->late; });
}
template <int MANY, int COUNT>
inline void wait_for_marked(const unsigned char* at, u64 apart, u32 but, u64 step, u32 many, u32 (&words)[MANY][COUNT][4]) {
    for (u32 i = 0; i < many; ++i) {
        for (u32 r = 0; r < COUNT; ++r) {
            const u32* there = reinterpret_cast<const u32*>(at + i * step + r * apart);
            if (r == but) continue;
            emulated::wait("wait_for_marked", [=] { return there[0] && there[1] && there[2] && there[3]; });
            std::memcpy(words[i][r], there, 16);
        }
    }
}
inline void raise_flag(u32* at, u32 call) {
    auto* block = emulated::current->block;
    emulated::wait("raise_flag", [=] { return block->far == 0; });
    emulated::copies.push_back([=] { *at = call; });
}
inline void wait_for_flag(const u32* at, u32 call) {
    emulated::wait("wait_for_flag", [=] { return static_cast<int>(*at - call) >= 0; });
}

inline float __uint_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline u32 __float_as_uint(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 both = x | static_cast<u64>(y) << 32;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<u32>(both >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
    return found;
}

inline u32 most_in_warp(u32 x) {
    emulated::in_warp("most_in_warp", &x, [](std::vector<void*>& all) {
        u32 most = 0;
        for (void* lane : all) most = std::max(most, *static_cast<u32*>(lane));
        for (void* lane : all) *static_cast<u32*>(lane) = most;
    });
    return x;
}

inline u16 rounded(float value) {
#if BF16
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7FFF;
    return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#else
    const _Float16 half = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
#endif
}

inline u16 written(const u16* x) { return *x; }
inline float one(u16 bits) {
#if BF16
    return __uint_as_float(static_cast<u32>(bits) << 16);
#else
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
#endif
}

inline float emulated::number(u16 bits) { return one(bits); }
inline u32 two(float low, float high) { return rounded(low) | static_cast<u32>(rounded(high)) << 16; }
inline u32 masked_with(u32 x, u32 mask, u32 more) { return (x & mask) | more; }
inline u32 bytes_of(u32 a, u32 b, u32 which) {
    u32 found = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 from = which >> (4 * i) & 7;
        found |= ((from < 4 ? a : b) >> (from % 4 * 8) & 255) << (8 * i);
    }
    return found;
}
inline u32 add_two(u32 a, u32 b) {
    return two(one(static_cast<u16>(a)) + one(static_cast<u16>(b)), one(a >> 16) + one(b >> 16));
}
inline u32 multiply_add_two(u32 a, u32 b, u32 c) {
    const auto done = [](u32 a, u32 b, u32 c) {
        return std::fma(one(static_cast<u16>(a)), one(static_cast<u16>(b)), one(static_cast<u16>(c)));
    };
    return two(done(a, b, c), done(a >> 16, b >> 16, c >> 16));
}
inline u32 multiply_two(u32 a, u32 b) { return multiply_add_two(a, b, 0); }
inline u16 narrow(float value) { return rounded(value); }
inline u32 larger_two(u32 a, u32 b) { return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16; }
inline int nearest(float value) { return static_cast<int>(std::nearbyint(value)); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float divided(float x, float by) { return x / by; }
inline float power_of_2(float x) { return std::exp2(x); }

inline u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// What is asked for is done when somebody waits for it, not before: whoever gives a stage back too early is found out.
inline void products_begin() {}

template <int N>
inline void multiply_wide(float (&sum)[N], u64 a, u64 b, bool add) {
    auto& group = emulated::current->block->groups[threadIdx.x / 128];
    emulated::in_four_warps("multiply_wide", sum, [&](std::vector<void*>& sums) { group.open.push_back({a, b, add, 2 * N, sums, {}, false}); });
}

template <int N>
inline void multiply_from_registers(float (&sum)[N], const u32 (&a)[4], u64 b, bool add, bool turned) {
    struct Mine {
        float* sum;
        const u32* a;
    } mine{sum, a};
    auto& group = emulated::current->block->groups[threadIdx.x / 128];
    emulated::in_four_warps("multiply_from_registers", &mine, [&](std::vector<void*>& all) {
        emulated::Products one{0, b, add, 2 * N, {}, {}, turned};
        for (void* thread : all) {
            one.sums.push_back(static_cast<Mine*>(thread)->sum);
            one.rows.push_back(static_cast<Mine*>(thread)->a);
        }
        group.open.push_back(one);
    });
}

template <int N>
inline void multiply_turned(float (&sum)[N], const u32 (&a)[4], u64 b, bool add) {
    multiply_from_registers(sum, a, b, add, true);
}

template <int N>
inline void multiply_across(float (&sum)[N], const u32 (&a)[4], u64 b, bool add) {
    multiply_from_registers(sum, a, b, add, false);
}

inline u64 descriptor_turned(u32 address, u32 apart) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(apart >> 4) << 16 | (64ull << 32) | (1ull << 62);
}

inline void products_asked() {
    auto& group = emulated::current->block->groups[threadIdx.x / 128];
    emulated::in_four_warps("products_asked", nullptr, [&](std::vector<void*>&) {
        group.asked.push_back(std::move(group.open));
        group.open.clear();
    });
}

template <int PENDING>
inline void products_done() {
    auto& group = emulated::current->block->groups[threadIdx.x / 128];
    emulated::in_four_warps("products_done", nullptr, [&](std::vector<void*>&) {
        while (group.asked.size() > PENDING) {
            for (const auto& one : group.asked.front()) {
                float a[64][16], b[256][16];
                for (int k = 0; k < 16; ++k) {
                    const bool registers = !one.rows.empty();
                    for (int i = 0; i < 64 && !registers; ++i) a[i][k] = emulated::element(one.a, i, k);
                    for (int j = 0; j < one.columns; ++j) {
                        b[j][k] = one.turned ? emulated::element(one.b, k, j) : emulated::element(one.b, j, k);
                    }
                    for (int thread = 0; thread < 128 && registers; ++thread) {
                        if (k / 2 % 4 != thread % 4) continue;
                        for (int half = 0; half < 2; ++half) {
                            const u32 pair = one.rows[thread][k / 8 * 2 + half];
                            a[thread / 32 * 16 + thread % 32 / 4 + half * 8][k] =
                                emulated::number(static_cast<u16>(pair >> (k % 2 * 16)));
                        }
                    }
                }
                for (int thread = 0; thread < 128; ++thread) {
                    float* sum = static_cast<float*>(one.sums[thread]);
                    for (int i = 0; i < one.columns / 2; ++i) {
                        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
                        const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
                        float x = one.add ? sum[i] : 0.0f;
                        for (int k = 0; k < 16; ++k) x += a[row][k] * b[column][k];
                        sum[i] = x;
                    }
                }
            }
            group.asked.erase(group.asked.begin());
        }
    });
}

template <int COUNT>
inline void products_used(float (&)[COUNT]) {}

struct Matrices {
    u32 from;
    u32* a;
};

template <bool TURNED>
inline void load_matrices_(u32 (&a)[4], u32 from) {
    Matrices mine{from, a};
    emulated::in_warp("load_matrices", &mine, [](std::vector<void*>& all) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                u16 pair[2];
                for (int i = 0; i < 2; ++i) {
                    const int row = TURNED ? lane % 4 * 2 + i : lane / 4, column = TURNED ? lane / 4 : lane % 4 * 2 + i;
                    const u32 at = static_cast<Matrices*>(all[matrix * 8 + row])->from;
                    std::memcpy(&pair[i], emulated::bytes_at(at, 16) + column * 2, 2);
                }
                static_cast<Matrices*>(all[lane])->a[matrix] = pair[0] | static_cast<u32>(pair[1]) << 16;
            }
        }
    });
}
inline void load_matrices(u32 (&a)[4], u32 from) { load_matrices_<false>(a, from); }
inline void load_matrices_turned(u32 (&a)[4], u32 from) { load_matrices_<true>(a, from); }

inline u32 turned(u32 pair) {
    struct Mine {
        u32 pair, other;
    } mine{pair, 0};
    emulated::in_warp("turned", &mine, [](std::vector<void*>& all) {
        const auto at = [&](int row, int column) {
            return static_cast<Mine*>(all[row * 4 + column / 2])->pair >> (column % 2 * 16) & 0xFFFF;
        };
        for (int lane = 0; lane < 32; ++lane) {
            static_cast<Mine*>(all[lane])->other = at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
        }
    });
    return mine.other;
}

template <float (*NUMBER)(u32)>
inline void multiply_(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct Mine {
        float* sum;
        const u32* a;
        u32 b[2];
    } mine{sum, a, {b0, b1}};
    emulated::in_warp("multiply", &mine, [](std::vector<void*>& all) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const Mine* one_ = static_cast<Mine*>(all[lane]);
            for (int i = 0; i < 2; ++i) {
                const int k = lane % 4 * 2 + i;
                const auto half = [i](u32 pair) { return NUMBER(pair >> (16 * i) & 0xFFFF); };
                for (int part = 0; part < 4; ++part) a[lane / 4 + part % 2 * 8][k + part / 2 * 8] = half(one_->a[part]);
                for (int part = 0; part < 2; ++part) b[k + part * 8][lane / 4] = half(one_->b[part]);
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                float x = static_cast<Mine*>(all[lane])->sum[i];
                for (int k = 0; k < 16; ++k) x += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
                static_cast<Mine*>(all[lane])->sum[i] = x;
            }
        }
    });
}

inline float of_bits(u32 bits) { return one(static_cast<u16>(bits)); }

inline void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_<of_bits>(sum, a, b0, b1); }

inline void multiply_first(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    for (float& one : sum) one = 0.0f;
    multiply(sum, a, b0, b1);
}

inline float of_half(u32 bits) {
    const u16 low = static_cast<u16>(bits);
    _Float16 half;
    std::memcpy(&half, &low, 2);
    return static_cast<float>(half);
}

inline u32 half_bits(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline u32 two_halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }

inline u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    const auto done = [](u32 a, u32 b, u32 c) { return std::fma(of_half(a), of_half(b), of_half(c)); };
    return two_halves(done(a, b, c), done(a >> 16, b >> 16, c >> 16));
}

inline void multiply_halves(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_<of_half>(sum, a, b0, b1); }

inline void multiply_halves_first(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
    multiply_halves(sum, a, b0, b1);
}

inline float e4m3(u32 code) {
    if ((code & 127) == 127) return std::nanf("");
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9);
    return code & 128 ? -size : size;
}

template <typename Sum>
inline void multiply_bytes(Sum (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    struct Mine {
        Sum* sum;
        u32 a[4], b[2];
    } mine{sum, {a0, a1, a2, a3}, {b0, b1}};
    emulated::in_warp("multiply_bytes", &mine, [](std::vector<void*>& all) {
        Sum a[16][32], b[32][8];
        const auto number = [](u32 code) {
            return std::is_same<Sum, int>::value ? static_cast<Sum>(static_cast<signed char>(code)) : static_cast<Sum>(e4m3(code));
        };
        for (int lane = 0; lane < 32; ++lane) {
            const Mine* one_ = static_cast<Mine*>(all[lane]);
            for (int i = 0; i < 4; ++i) {
                const int k = lane % 4 * 4 + i;
                for (int part = 0; part < 4; ++part) {
                    a[lane / 4 + part % 2 * 8][k + part / 2 * 16] = number(one_->a[part] >> (8 * i) & 255);
                }
                for (int part = 0; part < 2; ++part) b[k + part * 16][lane / 4] = number(one_->b[part] >> (8 * i) & 255);
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                Sum x = static_cast<Mine*>(all[lane])->sum[i];
                for (int k = 0; k < 32; ++k) x += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
                static_cast<Mine*>(all[lane])->sum[i] = x;
            }
        }
    });
}

inline u32 halves_below(u32 codes) { return two_halves(e4m3(codes & 255), e4m3(codes >> 8 & 255)); }
inline u32 halves_above(u32 codes) { return halves_below(codes >> 16); }

inline u32 code_of(float value) {  // the nearest, of two the even one
    if (std::isnan(value)) return 127;
    const float size = std::min(std::fabs(value), 448.0f);
    u32 best = 0;
    for (u32 code = 1; code < 127; ++code) {
        const float now = std::fabs(e4m3(code) - size), before = std::fabs(e4m3(best) - size);
        if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(value) ? 128 : 0);
}

inline u32 two_codes(float low, float high) { return code_of(low) | code_of(high) << 8; }
