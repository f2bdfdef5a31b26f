// What both kernels for decodes do (`decode.cu`, `decode_few.cu`), whatever form K and V are in.

// An item's turns, a multiple of the teams: its first is always the first team's, so that sums have an order by the item
// alone, whatever the block did before. A turn too many loads nothing.
__device__ __forceinline__ int turns_of(int chunks) {
    return (chunks + PER_TURN * TEAMS - 1) / (PER_TURN * TEAMS) * TEAMS;
}

// The warp that loads: chunks [begin, end) of a row, a turn after the other into the stages from the `at`-th on.
__device__ __forceinline__ void load_chunks(const TensorMap* keys, const TensorMap* values, const Arguments& a, u32 stages,
                                            u32 full, u32 empty, int row, int head, int begin, int end, u32& at, int lane) {
    const int* slots = a.table + row * a.table_row;
    int known = 0;  // slots of 32 chunks, one a lane
    const int turns = turns_of(end - begin);
    for (int chunk = begin; chunk < begin + turns * PER_TURN; chunk += PER_TURN, ++at) {
        const int ahead = (chunk - begin) % 32, left = end - chunk;
        if (ahead == 0) known = chunk + lane < end ? slots[chunk + lane] : 0;
        const int here = left < 0 ? 0 : left < PER_TURN ? left : PER_TURN;
        const u32 s = at % STAGES;
        if (at >= STAGES) barrier_wait(empty + 8 * s, (at / STAGES - 1) & 1);
        load_turn(keys, values, a, stages, s, full + 8 * s, head, known, ahead, here, lane);
    }
}

// The warps' sums, and the newest position if it is this block's: dimensions d to d + 3 of query g.
__device__ __forceinline__ Part of_block(const Shared& shared, bool newest, int g, int d) {
    Part all = {LOWEST};
    if (newest) {
        all.top = shared.new_score[g], all.total = 1.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) all.sum[j] = shared.new_value[d + j];
    }
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        Part one = {shared.tops[w][g], shared.totals[w][g]};
        load_shared(shared_address(&shared.sums[w][g][d]), one.sum);
        all.add(one);
    }
    return all;
}
