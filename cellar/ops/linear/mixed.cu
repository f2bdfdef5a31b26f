// Products of some tokens in 16 bits by a matrix in 4 or 8 bits on Hopper: out[m, n] = x[m, k] w[n, k]^T.
//
// The product is turned: rows of the matrix are the tall operand, whose codes become numbers in registers, where tensor
// cores take it from; tokens are the other one, in shared memory as they lie in memory. One thread asks the copy engine
// for both, four warps (a team) have 64 rows. While the tensor cores have 32 columns of a team, its warps make numbers
// of the next 32. In 4 bits zero points are taken away exactly and numbers are multiplied by their group's scale, then
// rounded once; in 8 bits codes are exact, and a row's scale goes onto its sum. Blocks of a cluster are parts of one sum:
// each adds up some rows, always in the same order, whatever tokens there are.
//
// Set by the compiler's options: BITS (4: in the order of `quant/fragments.py`; 8: of `quant/packed.py`), GROUP columns
// that share a scale (4 bits), TOKENS of a tile (8 to 256), TEAMS, PARTS of a sum, STAGES in flight, RESIDENT blocks of a
// multiprocessor, HAS_ZEROS (else 8 stands for 0), HAS_BIAS, BF16 (else float16), BF16_SCALES (else float16).

constexpr int WARPS = TEAMS * 4;         // that multiply; four more load
// Of each fourth of a multiprocessor, by eights: what a warp begins with, and what one that multiplies then has.
constexpr int BUDGET = 512 / RESIDENT / (TEAMS + 1) / 8 * 8 * (TEAMS + 1), IDLE = 24;
constexpr int BUSY = (BUDGET - IDLE) / TEAMS / 8 * 8 < 240 ? (BUDGET - IDLE) / TEAMS / 8 * 8 : 240;
constexpr int ROWS = TEAMS * 64;         // of a tile
constexpr int DEPTH = 128;               // columns of a stage
constexpr int CHUNK = 32;                // columns whose numbers are in registers at a time
constexpr int SHARES = BITS == 4 ? DEPTH / GROUP : 0;  // scales that a row has in a stage
constexpr u32 X_BYTES = TOKENS * DEPTH * 2, X_HALF = X_BYTES / 2;
constexpr u32 W_BYTES = ROWS * DEPTH * BITS / 8;
constexpr u32 S_BYTES = ROWS * SHARES * 2, Z_BYTES = HAS_ZEROS ? S_BYTES / 2 : 0;
constexpr u32 LOADED = X_BYTES + W_BYTES + S_BYTES + Z_BYTES, STAGE_BYTES = (LOADED + 1023) & ~1023u;
constexpr int OWNED = WARPS / PARTS;     // warps whose rows a block adds up
constexpr u32 PART_BYTES = 16 * TOKENS * 4;  // a warp's rows of another part

static_assert(BITS == 4 || BITS == 8);
static_assert(BITS == 8 || GROUP == 32 || GROUP == 64 || GROUP == 128);
static_assert(TOKENS % 8 == 0 && TOKENS <= 256 && ROWS <= 256 && WARPS % PARTS == 0);

struct Task {
    const TensorMap *xs, *ws, *ss, *zs;
    const float* scales;              // of rows
    const u16* bias;
    u16* out;
    int m, n;
    int token, row;                   // the tile's first
    int first_step, steps;            // this block's part of the sum
    u64 keep;                         // how long weights are kept
    bool early;                       // whether the next kernel's blocks may start where there is room
    u32 rank, full, empty, stages, staged;
};

// -- the thread that loads -------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_weights(const Task& task, int step, u32 s) {
    const u32 to = task.stages + s * STAGE_BYTES + X_BYTES, full = task.full + 8 * s;
    const int at = task.first_step + step;
    if constexpr (BITS == 8) {
        load_box(task.ws, to, full, 0, task.row, at, task.keep);
    } else {
        load_box(task.ws, to, full, 0, at * 16, task.row / 16, task.keep);
        load_box<1>(task.ss, to + W_BYTES, full, at * SHARES * 16, task.row / 16, 0, AGAIN);
        if (HAS_ZEROS) load_box<1>(task.zs, to + W_BYTES + S_BYTES, full, at * SHARES * 8, task.row / 16, 0, AGAIN);
    }
}

__device__ __forceinline__ void load_tokens(const Task& task, int step, u32 s) {
    const u32 to = task.stages + s * STAGE_BYTES, full = task.full + 8 * s;
    const int column = (task.first_step + step) * DEPTH;
    load_box<1>(task.xs, to, full, column, task.token, 0, AGAIN);
    load_box<1>(task.xs, to + X_HALF, full, column + DEPTH / 2, task.token, 0, AGAIN);
}

__device__ __forceinline__ void load_all(const Task& task) {
    int step = 0;
    // Weights depend on nothing: they are asked for before the kernel in front is done.
    for (; step < task.steps && step < STAGES; ++step) {
        barrier_expect(task.full + 8 * step, LOADED);
        load_weights(task, step, step);
    }
    wait_for_kernel_in_front();
    for (int i = 0; i < step; ++i) load_tokens(task, i, i);
    for (u32 s = 0, round = 0; step < task.steps; ++step) {
        barrier_wait(task.empty + 8 * s, round & 1);
        barrier_expect(task.full + 8 * s, LOADED);
        load_weights(task, step, s);
        load_tokens(task, step, s);
        if (++s == STAGES) s = 0, ++round;
    }
    if (task.early) let_next_kernel_start();
}

// -- codes to numbers ------------------------------------------------------------------------------------------------

// A number whose last bits are a code of 4, and what the code is worth more than that: 128 in bfloat16, whose mantissa
// ends with 1 there; 64 in float16, whose mantissa has 1 four bits further up.
constexpr u32 RAISE = BF16 ? 0x43004300 : 0x54005400, LOWER = RAISE | 0x80008000;
constexpr u32 MASK = BF16 ? 0x000f000f : 0x00f000f0;
constexpr u32 UNIT = BF16 ? 0x00010001 : 0x00100010;

// Of rows lane / 4 and eight behind, twice: what is added to a raised code, its scale, and what bfloat16 lacks of that.
struct Shared {
    u32 less[2], by[2], rest[2];
};

__device__ __forceinline__ Shared shared_of(u32 scales, u32 zeros) {
    Shared found;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        found.less[row] = LOWER + (HAS_ZEROS ? zeros >> 8 * row & 255 : 8) * UNIT;
        found.rest[row] = 0;
        if (BF16 == BF16_SCALES) {
            found.by[row] = bytes_of(scales, scales, row ? 0x3232 : 0x1010);
        } else if (BF16) {
            const u32 upper = __float_as_uint(of_half(row ? scales >> 16 : scales)) & 0xffff0000;
            const float rest = of_half(row ? scales >> 16 : scales) - __uint_as_float(upper);
            found.by[row] = upper | upper >> 16, found.rest[row] = two(rest, rest);
        } else {
            const float by = __uint_as_float(row ? scales & 0xffff0000 : scales << 16);
            found.by[row] = two(by, by);
        }
    }
    return found;
}

// The operand of a warp, 16 rows and 16 columns, of a word of codes as `quant/fragments.py` draws it.
__device__ __forceinline__ void numbers(u32 (&a)[4], u32 codes, const Shared& with) {
    constexpr int up = BF16 ? 0 : 4;  // to where float16 has its 1
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 placed = 4 * i < up ? codes << up : codes >> (4 * i - up);
        const u32 exact = add_two(masked_with(placed, MASK, RAISE), with.less[i % 2]);
        if (BF16 && !BF16_SCALES) {
            a[i] = multiply_add_two(exact, with.by[i % 2], multiply_two(exact, with.rest[i % 2]));
        } else {
            a[i] = multiply_two(exact, with.by[i % 2]);
        }
    }
}

// Of the lower (0) or upper (1) bytes of each half of a word, as whole numbers with a sign.
__device__ __forceinline__ u32 whole(u32 codes, int upper) {
    const u32 placed = upper ? codes >> 8 : codes;
    // Seven bits are what a bfloat16 of 128 and more has; the sign says whether 128 is too much, or 256.
    if (BF16) return add_two(masked_with(placed, 0x007f007f, 0x43004300), masked_with(placed, 0x00800080, 0xc300c300));
    return add_two((placed & 0x00ff00ff) ^ 0x64806480, 0xe480e480);
}

// What a lane takes of a stage: where its words are, how two of them become an operand's.
struct Codes {
    u32 at, pick, scales, zeros;
};

__device__ __forceinline__ Codes codes_of(u32 stage, int warp, int lane) {
    const u32 to = stage + X_BYTES, g = lane / 4, q = lane % 4;
    if constexpr (BITS == 8) {
        return {to + warp * 2048 + g * 128 + (g << 4) + q * 4, 0, 0, 0};
    } else {
        const u32 scales = to + W_BYTES + warp * SHARES * 32 + g * 4;
        const u32 zeros = to + W_BYTES + S_BYTES + warp * SHARES * 16 + g * 2;
        return {to + warp * 1024 + g * 64 + (g / 2 << 4) + q / 2 * 4, 0x6240 + q % 2 * 0x1111, scales, zeros};
    }
}

// Both operands of a chunk. In 8 bits they are 16 columns of each half of the stage, in 4 bits 32 neighbours.
__device__ __forceinline__ void operands(u32 (&a)[2][4], const Codes& from, Shared& with, int chunk) {
    u32 words[4];
    if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) load_word((from.at ^ (2 * chunk + i / 2) << 4) + i % 2 * 1024, words[i]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[0][i] = whole(words[i], 0), a[1][i] = whole(words[i], 1);
    } else {
        if (chunk * CHUNK % GROUP == 0) {
            u32 scales, zeros = 0;
            load_word(from.scales + chunk * CHUNK / GROUP * 32, scales);
            if (HAS_ZEROS) load_half(from.zeros + chunk * CHUNK / GROUP * 16, zeros);
            with = shared_of(scales, zeros);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) load_word((from.at ^ i << 4) + chunk / 2 * 512 + chunk % 2 * 8, words[i]);
        numbers(a[0], bytes_of(words[0], words[1], from.pick), with);
        numbers(a[1], bytes_of(words[2], words[3], from.pick), with);
    }
}

// The tokens that meet them.
__device__ __forceinline__ u64 tokens_of(u32 stage, int chunk, int operand) {
    const int column = BITS == 8 ? operand * 64 + chunk * 16 : chunk * CHUNK + operand * 16;
    return descriptor(stage + column / 64 * X_HALF) + column % 64 * 2 / 16;
}

// -- sums ------------------------------------------------------------------------------------------------------------

// Parts of other blocks lie as [part][warp][four sums][lane]: a block's own is left out.
__device__ __forceinline__ u32 part_at(const Task& task, int part, int owner, int warp, int lane) {
    return task.staged + ((part - (part > owner)) * OWNED + warp) * PART_BYTES + lane * 16;
}

__device__ __forceinline__ void send(const Task& task, const float (&sum)[TOKENS / 2], int warp, int lane) {
    const int owner = warp / OWNED;
    if (owner == task.rank) return;
    const u32 to = in_block(part_at(task, task.rank, owner, warp % OWNED, lane), owner);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) store_cluster(to + j * 512, sum + 4 * j);
}

__device__ __forceinline__ void receive(const Task& task, float (&sum)[TOKENS / 2], int warp, int lane) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if (part == task.rank) continue;
        const u32 from = part_at(task, part, task.rank, warp, lane);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            float x[4];
            load_shared(from + j * 512, x);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[4 * j + i] += x[i];
        }
    }
    __syncwarp();
}

// A warp's 16 rows of the matrix, turned back: 16 bytes a lane, through shared memory of its own.
__device__ __forceinline__ void write(const Task& task, const float (&sum)[TOKENS / 2], int row, u32 staged, int lane) {
    float by[2] = {1, 1}, bias[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int own = row + lane / 4 + 8 * i;
        if (BITS == 8 && own < task.n) by[i] = task.scales[own];
        if (HAS_BIAS && own < task.n) bias[i] = one(task.bias[own]);
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = sum[4 * j + 2 * i] * by[i] + bias[i], high = sum[4 * j + 2 * i + 1] * by[i] + bias[i];
            store_shared(staged + (j * 8 + lane / 4) * 32 + i * 16 + lane % 4 * 4, turned(two(low, high)));
        }
    }
    __syncwarp();
#pragma unroll
    for (int at = lane; at < TOKENS * 2; at += 32) {
        const int token = task.token + at / 2, first = row + at % 2 * 8;
        if (token >= task.m || first >= task.n) continue;
        u32 x[4];
        load_shared(staged + at * 16, x);
        store_global(task.out + static_cast<u64>(token) * task.n + first, x);
    }
}

__device__ __forceinline__ void multiply_all(const Task& task) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[TOKENS / 2];  // every part has a step
    u32 s = 0, round = 0, before = 0;
    for (int step = 0; step < task.steps; ++step) {
        const u32 stage = task.stages + s * STAGE_BYTES;
        const Codes from = codes_of(stage, warp, lane);
        barrier_wait(task.full + 8 * s, round & 1);
        u32 a[2][2][4];
        Shared with;
#pragma unroll
        for (int chunk = 0; chunk < DEPTH / CHUNK; ++chunk) {
            operands(a[chunk % 2], from, with, chunk);
            products_begin();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                multiply_across(sum, a[chunk % 2][i], tokens_of(stage, chunk, i), step > 0 || chunk + i > 0);
            }
            products_asked();
            products_done<1>();
            // So the last stage has been read.
            if (chunk == 0 && step > 0 && lane == 0) barrier_arrive(task.empty + 8 * before);
        }
        before = s;
        if (++s == STAGES) s = 0, ++round;
    }
    products_done<0>();
    products_used(sum);
    if constexpr (PARTS == 1) {
        sync_threads(1, WARPS * 32);  // the stages are memory to write in now
        write(task, sum, task.row + warp * 16, task.staged + warp * TOKENS * 32, lane);
    } else {
        send(task, sum, warp, lane);
        cluster_sync<true>();  // what others sent is there
        if (warp / OWNED == task.rank) {
            receive(task, sum, warp % OWNED, lane);
            // Of this warp's, the first part has been added.
            write(task, sum, task.row + warp * 16, task.staged + warp % OWNED * PART_BYTES, lane);
        }
    }
}

// steps: turns of 128 columns; down: tiles of tokens.
extern "C" __global__ void __launch_bounds__(WARPS * 32 + 128, RESIDENT)
    mixed_product(const __grid_constant__ TensorMap xs, const __grid_constant__ TensorMap ws,
                  const __grid_constant__ TensorMap ss, const __grid_constant__ TensorMap zs, const float* scales,
                  const u16* bias, u16* out, int m, int n, int steps, int down) {
    const u32 rank = PARTS > 1 ? rank_in_cluster() : 0;
    const int tile = blockIdx.x / PARTS;
    Task task = {&xs, &ws, &ss, &zs, scales, bias, out, m, n};
    task.rank = rank;
    // Tiles of the same rows first: their weights are read once from memory.
    task.token = tile % down * TOKENS, task.row = tile / down * ROWS;
    task.first_step = steps * rank / PARTS, task.steps = steps * (rank + 1) / PARTS - task.first_step;
    task.keep = down > 1 ? AGAIN : ONCE;
    // Behind what makes rows wider there is attention or a product, whose blocks fill a multiprocessor.
    task.early = n > steps * DEPTH;
    task.full = shared_address(shared_memory()), task.empty = task.full + 8 * STAGES;
    task.stages = (task.empty + 8 * STAGES + 1023) & ~1023u;
    task.staged = task.stages + (PARTS > 1 ? STAGES * STAGE_BYTES : 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(task.full + 8 * s, 1);
            barrier_init(task.empty + 8 * s, WARPS);
        }
        barriers_made();
        prefetch(&xs);
        prefetch(&ws);
        if (BITS == 4) prefetch(&ss);
        if (BITS == 4 && HAS_ZEROS) prefetch(&zs);
    }
    if constexpr (PARTS > 1) {
        cluster_sync<false>();
    } else {
        __syncthreads();
    }
    if (threadIdx.x >= WARPS * 32) {
        fewer_registers<IDLE>();
        if (threadIdx.x == WARPS * 32) load_all(task);
        __syncwarp();
        if constexpr (PARTS > 1) cluster_sync<true>();
    } else {
        more_registers<BUSY>();
        multiply_all(task);
    }
}
