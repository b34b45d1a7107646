// Splitting a loop over threads that help each other out.
#pragma once

#include <stdint.h>

// Part [begin, end) of a loop. `thread` is below num_threads(); no other part that runs now has the same one.
typedef void (*range_fn)(const void *context, int64_t begin, int64_t end, int thread);

int num_threads(void);

// Runs `fn` over [0, size) in parts of `grain`, on all threads; returns when all are done. A loop of one
// part runs in the caller. Parts may run in any order: no result may depend on it.
void parallel_for(int64_t size, int64_t grain, range_fn fn, const void *context);

// The grain that makes parts of about `part_work` units of work when an item is `item_work`.
static inline int64_t grain_of(int64_t item_work, int64_t part_work) {
    return item_work >= part_work ? 1 : part_work / (item_work > 0 ? item_work : 1);
}
