// A small sum over devices, the residual and RMSNorm in one (`peers.py`): rows of WIDTH numbers, SLICES blocks to a row,
// which are a cluster and have no other. Behind `peers.cu`, whose boxes and numbered words it uses.
//
// With HOPS = 1 every rank pushes its part of a row to all others and adds all parts, as `sum_at_once`. With HOPS = 2 a
// rank adds a piece of every row for all and pushes the sum, as `sum_by_pieces`, but by numbered words on both ways.

constexpr int UNITS = WIDTH * 4 / PER_WORD / 8 / SLICES;  // of 8 bytes in a block's slice of a row
constexpr int MANY = (UNITS + THREADS - 1) / THREADS;     // of a thread, at most
constexpr int OWNED = UNITS / RANKS;                      // of a slice that a rank adds
constexpr int WARPS = THREADS / 32;

static_assert(HOPS == 1 || UNITS % RANKS == 0, "a rank has whole units of a slice");

// Where the sums that rank `rank` has made lie, behind the parts that it sends.
__device__ __forceinline__ unsigned char* small_sum(u64 box, u32 call, u32 rank) {
    return small_part(box, call, rank) + SLOT / 2;
}

struct NormGiven {
    const unsigned char *x, *residual, *weight;  // [rows, WIDTH], the same, [WIDTH]
    unsigned char *normed, *total;               // [rows, WIDTH]
    const u64* boxes;
    u32* calls;
    u32 rank, rows;
    float eps;
};

// Of all threads of the cluster that has a row.
__device__ __forceinline__ float sum_of_row(float x, float* shared, u32 slice) {
    const u32 thread = threadIdx.x;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    __syncthreads();  // who is late has read what was there before
    if (thread % 32 == 0) shared[thread / 32] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += shared[i];
    if constexpr (SLICES == 1) return total;
    float* theirs = shared + (WARPS + 3) / 4 * 4;  // [SLICES, 4]
    const u32 first = rank_in_cluster() - slice;
    if (thread < SLICES) {
        const float four[4] = {total, 0.0f, 0.0f, 0.0f};
        store_cluster(in_block(shared_address(theirs + 4 * slice), first + thread), four);
    }
    cluster_sync<true>();
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) total += theirs[4 * i];
    return total;
}

__device__ __forceinline__ void add_and_norm(const NormGiven& given, u32 block, u32 blocks) {
    const u32 thread = threadIdx.x, rank = given.rank, slice = block % SLICES, step = blocks / SLICES;
    float* shared = reinterpret_cast<float*>(shared_memory());
    const u64 mine = given.boxes[rank];
    u64 theirs[RANKS];
    find_boxes(theirs, given.boxes, rank);
    u32 gains[MANY][2];
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        const u32 unit = thread + i * THREADS;
        if (unit < UNITS) load_global(given.weight + 8ull * (slice * UNITS + unit), gains[i]);
    }
    begin();
    const u32 call = given.calls[block] + 1;
    const u64 row_bytes = 8ull * UNITS * SLICES;
    for (u32 row = block / SLICES; row < given.rows; row += step) {
        const unsigned char* x = given.x + row * row_bytes + 8ull * UNITS * slice;
        for (u32 unit = thread; unit < UNITS; unit += THREADS) {
            u32 own[2];
            load_global(x + 8ull * unit, own);
            const u32 sent[4] = {own[0], call, own[1], call};
            if constexpr (HOPS == 1) {
                const u64 at = 16ull * ((row * SLICES + slice) * UNITS + unit);
#pragma unroll
                for (int k = 1; k < RANKS; ++k) store_far(small_part(theirs[k], call, rank) + at, sent);
            } else {
                const u32 owner = unit / OWNED;
                const u64 at = 16ull * ((row * SLICES + slice) * OWNED + unit % OWNED);
                if (owner != rank) store_far(small_part(given.boxes[owner], call, rank) + at, sent);
            }
        }
    }
    if constexpr (HOPS == 2) {
        for (u32 row = block / SLICES; row < given.rows; row += step) {
            const unsigned char* x = given.x + row * row_bytes + 8ull * (UNITS * slice + OWNED * rank);
            for (u32 unit = thread; unit < OWNED; unit += THREADS) {
                const u64 at = 16ull * ((row * SLICES + slice) * OWNED + unit);
                u32 words[RANKS][2], own[2];
                load_global(x + 8ull * unit, own);
                wait_for_words(small_part(mine, call, 0) + at, SLOT, rank, call, words);
                u32 sum[2];
                add_parts(words, own, rank, sum);
                const u32 sent[4] = {sum[0], call, sum[1], call};
#pragma unroll
                for (int k = 1; k < RANKS; ++k) store_far(small_sum(theirs[k], call, rank) + at, sent);
                store_far(small_sum(mine, call, rank) + at, sent);
            }
        }
    }
    for (u32 row = block / SLICES; row < given.rows; row += step) {
        const u64 start = row * row_bytes + 8ull * UNITS * slice;
        u32 words[MANY][2], before[MANY][2];
        float numbers[MANY][2 * PER_WORD], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const u32 unit = thread + i * THREADS;
            if (unit < UNITS) load_global(given.residual + start + 8ull * unit, before[i]);
        }
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const u32 unit = thread + i * THREADS;
            if (unit >= UNITS) continue;
            if constexpr (HOPS == 1) {
                u32 parts[RANKS][2], own[2];
                load_global(given.x + start + 8ull * unit, own);
                const u64 at = 16ull * ((row * SLICES + slice) * UNITS + unit);
                wait_for_words(small_part(mine, call, 0) + at, SLOT, rank, call, parts);
                add_parts(parts, own, rank, words[i]);
            } else {
                u32 sum[1][2];
                const u64 at = 16ull * ((row * SLICES + slice) * OWNED + unit % OWNED);
                wait_for_words(small_sum(mine, call, unit / OWNED) + at, 0, 1, call, sum);
                words[i][0] = sum[0][0], words[i][1] = sum[0][1];
            }
            u32 total[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float low[PER_WORD];
                add_word(low, before[i][half], true);
                add_word(low, words[i][half], false);
                total[half] = as_word(low);
                add_word(low, total[half], true);
#pragma unroll
                for (int k = 0; k < PER_WORD; ++k) {
                    numbers[i][half * PER_WORD + k] = low[k];
                    squares += low[k] * low[k];
                }
            }
            store_global(given.total + start + 8ull * unit, total);
        }
        const float scale = 1.0f / sqrtf(sum_of_row(squares, shared, slice) / WIDTH + given.eps);
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const u32 unit = thread + i * THREADS;
            if (unit >= UNITS) continue;
            u32 normed[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float value[PER_WORD], gain[PER_WORD];
#pragma unroll
                for (int k = 0; k < PER_WORD; ++k) value[k] = numbers[i][half * PER_WORD + k] * scale;
                add_word(value, as_word(value), true);  // rounded before the weight is applied
                add_word(gain, gains[i][half], true);
#pragma unroll
                for (int k = 0; k < PER_WORD; ++k) value[k] *= gain[k];
                normed[half] = as_word(value);
            }
            store_global(given.normed + start + 8ull * unit, normed);
        }
    }
    __syncthreads();
    count_calls(given.calls, call, block, blocks);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_norm(NormGiven given) { add_and_norm(given, blockIdx.x, gridDim.x); }
