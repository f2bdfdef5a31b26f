// Collectives over devices that write into each other's memory (`peers.py`): sums, by a kernel for small ones and one for
// large ones, and gathers of little.
//
// Every rank has a box that all others write to. Small sums (`sum_at_once`): each rank pushes all of its numbers to every
// other one, and each adds all parts; gathers likewise. Every 8 bytes travel with the number of the call, so that who waits for the data
// waits for nothing else: no flag behind it, and no fence that first waits until all of it has arrived. Large sums
// (`sum_by_pieces`): a rank adds one piece for all, so that each link carries what it must; there the numbers travel
// alone, and a flag for each block's share follows them. Sums between these (`sum_in_blanks`): pieces, too, but into places
// that are zero before, and no 4 bytes that travel are: so again the data says itself that it has come, with no bytes added.
// Who has read it makes its place zero again.
//
// Parts are added in the order of ranks, in float32, and rounded once. Slots of small parts alternate from call to call: who
// writes into one again has heard from everybody since, so all have read what lay there. So do blanks. Pieces and their sums need no
// second slot: the last that a rank hears of a call comes when its pieces have been read, and the first that it hears of
// the next one when its sums have.

#if FLOATS
constexpr int PER_WORD = 1;
#else
constexpr int PER_WORD = 2;
#endif

// A box: flags [2][RANKS][BLOCKS], small parts [2][RANKS][SLOT], pieces [RANKS][PIECE], sums [RANKS][PIECE], blanks for
// pieces and for sums [2][2][RANKS][BLANK].
// SLOT: bytes of all numbered words of a rank in a call; PIECE: bytes of the largest piece, and BLANK of one in blanks.
constexpr u64 FLAGS = 8ull * RANKS * BLOCKS;
constexpr u64 SMALL_PARTS = FLAGS, PIECES = SMALL_PARTS + 2ull * RANKS * SLOT, SUMS = PIECES + 1ull * RANKS * PIECE;
constexpr u64 BLANKS = SUMS + 1ull * RANKS * PIECE;

__device__ __forceinline__ unsigned char* small_part(u64 box, u32 call, u32 rank) {
    return reinterpret_cast<unsigned char*>(box + SMALL_PARTS + ((call & 1) * RANKS + rank) * static_cast<u64>(SLOT));
}

__device__ __forceinline__ unsigned char* piece_of(u64 box, u32 rank) {
    return reinterpret_cast<unsigned char*>(box + PIECES + rank * static_cast<u64>(PIECE));
}

__device__ __forceinline__ unsigned char* sum_of(u64 box, u32 rank) {
    return reinterpret_cast<unsigned char*>(box + SUMS + rank * static_cast<u64>(PIECE));
}

__device__ __forceinline__ unsigned char* blank_piece(u64 box, u32 call, u32 rank) {
    return reinterpret_cast<unsigned char*>(box + BLANKS + ((call & 1) * 2 * RANKS + rank) * static_cast<u64>(BLANK));
}

__device__ __forceinline__ unsigned char* blank_sum(u64 box, u32 call, u32 rank) {
    return blank_piece(box, call, rank) + 1ull * RANKS * BLANK;
}

__device__ __forceinline__ u32* flag_of(u64 box, u32 phase, u32 rank, u32 block) {
    return reinterpret_cast<u32*>(box) + (phase * RANKS + rank) * BLOCKS + block;
}

__device__ __forceinline__ void add_word(float (&total)[PER_WORD], u32 word, bool first) {
#if FLOATS
    const float x[1] = {__uint_as_float(word)};
#else
    const float x[2] = {one(static_cast<u16>(word)), one(static_cast<u16>(word >> 16))};
#endif
#pragma unroll
    for (int i = 0; i < PER_WORD; ++i) total[i] = first ? x[i] : total[i] + x[i];
}

__device__ __forceinline__ u32 as_word(const float (&total)[PER_WORD]) {
#if FLOATS
    return __float_as_uint(total[0]);
#else
    return two(total[0], total[1]);
#endif
}

// The sum of 8 bytes of all ranks.
__device__ __forceinline__ void add_parts(const u32 (&words)[RANKS][2], const u32 (&own)[2], u32 rank, u32 (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total[PER_WORD];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) add_word(total, r == rank ? own[half] : words[r][half], r == 0);
        sum[half] = as_word(total);
    }
}

// The sum of 16 bytes of all ranks.
__device__ __forceinline__ void add_all(const u32 (&words)[RANKS][4], u32 (&sum)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float total[PER_WORD];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) add_word(total, words[r][i], r == 0);
        sum[i] = as_word(total);
    }
}

// Not zero: where it is, a zero with a sign, which is as much.
__device__ __forceinline__ void mark(u32 (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = words[i] ? words[i] : 0x80000000u;
}

// The counters of all blocks that a launch may have: those of blocks that this one is too small to have, too.
__device__ __forceinline__ void count_calls(u32* calls, u32 call, u32 block, u32 blocks) {
    for (u32 at = block + blocks * threadIdx.x; at < BLOCKS; at += blocks * THREADS) calls[at] = call;
}

// GPUs before Hopper begin a kernel when the one in front has ended.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    wait_for_kernel_in_front();
    let_next_kernel_start();
#endif
}

// What a thread has of a small collective: units first, first + step, ... of 8 bytes.
struct Some {
    u32 first, step, units;
};

// This rank's `units` of 8 bytes, into the boxes of all others.
__device__ __forceinline__ void push_small(const unsigned char* x, const u64 (&theirs)[RANKS], u32 call, u32 rank, const Some& some) {
    for (u32 unit = some.first; unit < some.units; unit += some.step) {
        u32 own[2];
        load_global(x + 8ull * unit, own);
        const u32 sent[4] = {own[0], call, own[1], call};
#pragma unroll
        for (int k = 1; k < RANKS; ++k) store_far(small_part(theirs[k], call, rank) + 16ull * unit, sent);
    }
}

// Boxes of the others, from the next rank on, so that not all push to one first.
__device__ __forceinline__ void find_boxes(u64 (&theirs)[RANKS], const u64* boxes, u32 rank) {
#pragma unroll
    for (int k = 1; k < RANKS; ++k) theirs[k] = boxes[(rank + k) % RANKS];
}

// This rank's `units` of 8 bytes at x to all others, and `put(unit, words, own)` for each of them once all ranks' words are
// there. boxes: addresses of all ranks' boxes. calls: [BLOCKS].
template <class Put>
__device__ __forceinline__ void exchange_at_once(const unsigned char* x, const u64* boxes, u32* calls, u32 rank, u32 units, u32 block,
                                                 u32 blocks, const Put& put) {
    const u64 mine = boxes[rank];
    u64 theirs[RANKS];
    find_boxes(theirs, boxes, rank);
    begin();
    const u32 call = calls[block] + 1;
    const Some some{block * THREADS + threadIdx.x, blocks * THREADS, units};
    push_small(x, theirs, call, rank, some);
    for (u32 unit = some.first; unit < units; unit += some.step) {
        u32 words[RANKS][2], own[2];
        load_global(x + 8ull * unit, own);
        wait_for_words(small_part(mine, call, 0) + 16ull * unit, SLOT, rank, call, words);
        put(unit, words, own);
    }
    __syncthreads();  // all threads have read the counter
    count_calls(calls, call, block, blocks);
}

// x, out: `units` of 8 bytes.
__device__ __forceinline__ void add_at_once(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank,
                                            u32 units, u32 block, u32 blocks) {
    exchange_at_once(x, boxes, calls, rank, units, block, blocks, [=](u32 unit, const u32 (&words)[RANKS][2], const u32 (&own)[2]) {
        u32 sum[2];
        add_parts(words, own, rank, sum);
        store_global(out + 8ull * unit, sum);
    });
}

// Rows of `width` units of 8 bytes of the first `kept` ranks, side by side; `out` may be `x` where that is one.
__device__ __forceinline__ void gather_at_once(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank,
                                               u32 units, u32 width, u32 kept, u32 block, u32 blocks) {
    exchange_at_once(x, boxes, calls, rank, units, block, blocks, [=](u32 unit, const u32 (&words)[RANKS][2], const u32 (&own)[2]) {
        const u64 row = unit / width, column = unit % width;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            if (r >= kept) continue;
            const u32 part[2] = {r == rank ? own[0] : words[r][0], r == rank ? own[1] : words[r][1]};
            store_global(out + 8 * ((row * kept + r) * width + column), part);
        }
    });
}

// Units [first, last) of 16 bytes, to another device if OUT, else of what others have written here.
template <bool OUT>
__device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, u32 first, u32 last) {
    constexpr int MANY = 4;  // on their way at once
    for (u32 unit = first + threadIdx.x; unit < last; unit += MANY * THREADS) {
        u32 x[MANY][4];
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            if (unit + i * THREADS < last) load_far(from + 16ull * (unit + i * THREADS), x[i]);
        }
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            if (unit + i * THREADS >= last) continue;
            if constexpr (OUT) {
                store_far(to + 16ull * (unit + i * THREADS), x[i]);
            } else {
                store_global(to + 16ull * (unit + i * THREADS), x[i]);
            }
        }
    }
}

// x, out: `units` of 16 bytes, of which each rank adds a piece; each block has its share of every piece.
__device__ __forceinline__ void add_by_pieces(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank,
                                              u32 units, u32 block, u32 blocks) {
    begin();
    const u32 call = calls[block] + 1, thread = threadIdx.x;
    const u64 mine = boxes[rank];
    const u32 piece = (units + RANKS - 1) / RANKS, share = (piece + blocks - 1) / blocks;
    const u32 start = block * share, stop = start + share;
    // Of a piece that begins at unit `at`, what this block has: [start, within(at)).
    const auto within = [=](u32 at) {
        const u32 longest = at < units ? (units - at < piece ? units - at : piece) : 0;
        return stop < longest ? stop : longest;
    };
    for (u32 k = 1; k < RANKS; ++k) {
        const u32 to = (rank + k) % RANKS, at = to * piece;
        copy<true>(piece_of(boxes[to], rank), x + 16ull * at, start, within(at));
    }
    __syncthreads();  // and all threads have read the counter
    const bool speaks = thread < RANKS && thread != rank;
    if (speaks) {
        raise_flag(flag_of(boxes[thread], 0, rank, block), call);
        wait_for_flag(flag_of(mine, 0, thread, block), call);
    }
    __syncthreads();
    for (u32 unit = start + thread; unit < within(rank * piece); unit += THREADS) {
        u32 words[RANKS][4], sum[4];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            load_far((r == rank ? x + 16ull * rank * piece : piece_of(mine, r)) + 16ull * unit, words[r]);
        }
        add_all(words, sum);
        store_global(out + 16ull * (rank * piece + unit), sum);
        for (u32 k = 1; k < RANKS; ++k) {
            store_far(sum_of(boxes[(rank + k) % RANKS], rank) + 16ull * unit, sum);
        }
    }
    __syncthreads();
    if (speaks) {
        raise_flag(flag_of(boxes[thread], 1, rank, block), call);
        wait_for_flag(flag_of(mine, 1, thread, block), call);
    }
    __syncthreads();
    for (u32 k = 1; k < RANKS; ++k) {
        const u32 from = (rank + k) % RANKS, at = from * piece;
        copy<false>(out + 16ull * at, sum_of(mine, from), start, within(at));
    }
    count_calls(calls, call, block, blocks);
}

// The same in blanks: a thread has units first, first + step, ... of every piece, and waits for those alone.
__device__ __forceinline__ void add_in_blanks(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank,
                                              u32 units, u32 block, u32 blocks) {
    constexpr int MANY = 2;  // waited for at once
    const u64 mine = boxes[rank];
    u64 theirs[RANKS];
    find_boxes(theirs, boxes, rank);
    begin();
    const u32 call = calls[block] + 1, first = block * THREADS + threadIdx.x, step = blocks * THREADS;
    const u32 piece = (units + RANKS - 1) / RANKS;
    const auto length = [=](u32 r) {
        const u32 at = r * piece;
        return at < units ? (units - at < piece ? units - at : piece) : 0;
    };
#pragma unroll
    for (int k = 1; k < RANKS; ++k) {
        const u32 to = (rank + k) % RANKS;
        unsigned char* there = blank_piece(theirs[k], call, rank);
        for (u32 unit = first; unit < length(to); unit += step) {
            u32 own[4];
            load_global(x + 16ull * (to * piece + unit), own);
            mark(own);
            store_far(there + 16ull * unit, own);
        }
    }
    for (u32 unit = first; unit < length(rank); unit += MANY * step) {
        const u32 left = (length(rank) - unit + step - 1) / step, many = left < MANY ? left : MANY;
        u32 words[MANY][RANKS][4];
        wait_for_marked(blank_piece(mine, call, 0) + 16ull * unit, BLANK, rank, 16ull * step, many, words);
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            if (i >= many) continue;
            const u64 at = 16ull * (unit + i * step);
            u32 own[4], sum[4];
            load_global(x + 16ull * rank * piece + at, own);
            mark(own);
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                if (r != rank) clear_for_others(blank_piece(mine, call, r) + at);
#pragma unroll
                for (int n = 0; n < 4; ++n) words[i][r][n] = r == rank ? own[n] : words[i][r][n];
            }
            add_all(words[i], sum);
            mark(sum);
#pragma unroll
            for (int k = 1; k < RANKS; ++k) store_far(blank_sum(theirs[k], call, rank) + at, sum);
            store_global(out + 16ull * rank * piece + at, sum);
        }
    }
#pragma unroll
    for (int k = 1; k < RANKS; ++k) {
        const u32 from = (rank + k) % RANKS;
        unsigned char* there = blank_sum(mine, call, from);
        for (u32 unit = first; unit < length(from); unit += MANY * step) {
            const u32 left = (length(from) - unit + step - 1) / step, many = left < MANY ? left : MANY;
            u32 sums[MANY][1][4];
            wait_for_marked(there + 16ull * unit, 0, 1, 16ull * step, many, sums);
#pragma unroll
            for (int i = 0; i < MANY; ++i) {
                if (i >= many) continue;
                const u64 at = 16ull * (unit + i * step);
                clear_for_others(there + at);
                store_global(out + 16ull * from * piece + at, sums[i][0]);
            }
        }
    }
    __syncthreads();  // all threads have read the counter
    count_calls(calls, call, block, blocks);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sum_at_once(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank, u32 units) {
    add_at_once(x, out, boxes, calls, rank, units, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_rows(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank, u32 units, u32 width, u32 kept) {
    gather_at_once(x, out, boxes, calls, rank, units, width, kept, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sum_in_blanks(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank, u32 units) {
    add_in_blanks(x, out, boxes, calls, rank, units, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sum_by_pieces(const unsigned char* x, unsigned char* out, const u64* boxes, u32* calls, u32 rank, u32 units) {
    add_by_pieces(x, out, boxes, calls, rank, units, blockIdx.x, gridDim.x);
}
