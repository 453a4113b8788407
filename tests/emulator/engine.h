// What a kernel asks the engine for: see engine.cpp.

#pragma once

struct Dim3 { unsigned x, y, z; };
extern "C" {
extern Dim3 emu_thread, emu_block, emu_grid;
extern char emu_shared[];  // as much as a launch asks for, then pages that cannot be read
}

namespace emu {
[[noreturn]] void fail(const char* what);  // ends the launch
void meet_block();
void meet_warp();
int count_in_block(bool holds);
unsigned long long* warp_slots();          // 32 words of this thread's warp
void check(const void* at, int bytes, bool writes);
unsigned shared_handle(const void* at);    // addresses of shared memory have 32 bits
void copy_later(unsigned shared, const void* from, int bytes, int copied);
void commit_copies();
void wait_for_copies(int groups);
}  // namespace emu
