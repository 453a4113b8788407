// Among the threads of a row, in one block or in the blocks of a cluster: a reduction of what they found. The constants
// are those of rows.cu.

constexpr int WARPS = (THREADS + 31) / 32, MOST_VALUES = VALUES ? VALUES : 1;

// A block's threads, ROWS teams of THREADS.
__device__ __forceinline__ int team_of_thread() { return ROWS == 1 ? 0 : threadIdx.x / THREADS; }
__device__ __forceinline__ int lane_in_team() { return ROWS == 1 ? threadIdx.x : threadIdx.x % THREADS; }

// Two of each, used in turn: who is slow reads one while who is fast writes the other.
struct Exchange {
    acc_t warps[2][ROWS][WARPS][MOST_VALUES];
    acc_t blocks[2][ROWS][CLUSTER][MOST_VALUES];
    unsigned long long arrived[2][ROWS];  // mbarriers: a team has the values of those of the other blocks
};

// No block writes to another before that one has made its barriers: it says so here, and waits for the others
// in `opened`, when its first loads are on their way.
__device__ __forceinline__ void open(Exchange& exchange) {
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x < 2 * ROWS) make_barrier(&exchange.arrived[threadIdx.x / ROWS][threadIdx.x % ROWS], 1);
        arrive_in_cluster();
    }
}
__device__ __forceinline__ void opened() {
    if constexpr (CLUSTER > 1) wait_for_cluster();
}

// N sets of values in shared memory, N a power of two, joined in every lane.
template <int PASS, int N>
__device__ __forceinline__ void join(acc_t (&values)[MOST_VALUES], int lane, const acc_t (&sets)[N][MOST_VALUES]) {
    constexpr int FIRST = Values<PASS>::FIRST, COUNT = Values<PASS>::COUNT;
#pragma unroll
    for (int k = FIRST; k < FIRST + COUNT; ++k) values[k] = sets[lane % N][k];
    join_lanes<PASS, N>(values);
}

// All threads of a row come together. Teams that stay are on their own: what one waits for, another need not. (Where
// blocks come and go, a barrier by number cost up to 14 %.)
__device__ __forceinline__ void meet() {
    static_assert(WARPS == 1 || ROWS < 16, "a block has 16 barriers");
    if constexpr (WARPS == 1) __syncwarp();
    else if constexpr (ROWS == 1 || KIND != STAGED) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + team_of_thread()), "n"(THREADS) : "memory");
}

// A reduction in three steps, with time for other work between them: before and after the threads `meet`, and
// when the values of the other blocks have come.
template <int PASS>
__device__ __forceinline__ void publish(acc_t (&values)[MOST_VALUES], Exchange& exchange, int turn, int team, int lane) {
    constexpr int FIRST = Values<PASS>::FIRST, COUNT = Values<PASS>::COUNT;
    join_lanes<PASS, (THREADS < 32 ? THREADS : 32)>(values);
    if (WARPS > 1 && lane % 32 == 0)
#pragma unroll
        for (int k = FIRST; k < FIRST + COUNT; ++k) exchange.warps[turn & 1][team][lane / 32][k] = values[k];
}
template <int PASS>
__device__ __forceinline__ void gather(acc_t (&values)[MOST_VALUES], Exchange& exchange, int turn, int team, int lane) {
    constexpr int FIRST = Values<PASS>::FIRST, COUNT = Values<PASS>::COUNT;
    if constexpr (WARPS > 1) join<PASS, WARPS>(values, lane, exchange.warps[turn & 1][team]);
    if constexpr (CLUSTER > 1) {
        Barrier* arrived = &exchange.arrived[turn & 1][team];
        if (lane == 0) expect(arrived, CLUSTER * COUNT * sizeof(acc_t));
        if (lane < CLUSTER)
#pragma unroll
            for (int k = FIRST; k < FIRST + COUNT; ++k)
                send(&exchange.blocks[turn & 1][team][cluster_rank()][k], arrived, lane, values[k]);
    }
}
template <int PASS>
__device__ __forceinline__ void receive(acc_t (&values)[MOST_VALUES], Exchange& exchange, int& turn, int team, int lane) {
    if constexpr (CLUSTER > 1) {
        await(&exchange.arrived[turn & 1][team], turn >> 1 & 1);
        join<PASS, CLUSTER>(values, lane, exchange.blocks[turn & 1][team]);
    }
    ++turn;
}

template <int PASS>
__device__ __forceinline__ void reduce(acc_t (&values)[MOST_VALUES], Exchange& exchange, int& turn, int team, int lane) {
    publish<PASS>(values, exchange, turn, team, lane);
    if constexpr (WARPS > 1) meet();
    gather<PASS>(values, exchange, turn, team, lane);
    receive<PASS>(values, exchange, turn, team, lane);
}
