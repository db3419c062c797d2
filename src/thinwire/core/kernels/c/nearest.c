/* SPDX-License-Identifier: Apache-2.0 */
/* Facility location from the points' coordinates: distances, rounding, gains and their sums in one pass, so that no
   distance is stored.

   Points are stored in panels, [panels][features][LANES], so that one load reads one feature of LANES points. Every
   squared distance is the sum of squared differences in the order of the features: the expanded form with products
   would lose the digits of points that are close together, and a pair's distance must not depend on the block in which
   it is computed.

   Distances are at most 1, and are rounded to multiples of 2^-23: sums of up to 2^30 of them are exact in double, so
   neither blocks nor threads nor ranks change a gain. */

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define TOGETHER 8
#define PANELS 4
#define BLOCK_FLOATS (1 << 16)
#define MOST_THREADS 64
#define WORK_PER_THREAD (1 << 20)

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Replace squared distances by rounded distances. Adding and subtracting 1 rounds to multiples of 2^-23. */
static inline __attribute__((always_inline)) void finish(float *squares, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float distance = (sqrtf(squares[i]) + 1.0f) - 1.0f;
        squares[i] = distance > 1.0f ? 1.0f : distance;
    }
}

static inline __attribute__((always_inline)) void measure(
    const float *panel, const float *candidates, int64_t features, int count, lanes *squares) {
    for (int c = 0; c < count; c++) squares[c] = (lanes){};
    for (int64_t k = 0; k < features; k++) {
        lanes x = *(const lanes *)(panel + k * LANES);
        for (int c = 0; c < count; c++) {
            lanes gap = x - candidates[c * features + k];
            squares[c] += gap * gap;
        }
    }
}

/* A task on some of the panels. */
typedef struct {
    const float *points, *candidates;
    float *near;
    const float *later;
    int32_t *nearest, position;
    int64_t panels, features, count;
    double *sums, *later_sums;
} work;

static inline __attribute__((always_inline)) void add(const float *near, const float *distances, double *total) {
#pragma omp simd
    for (int lane = 0; lane < LANES; lane++) {
        float gain = near[lane] - distances[lane];
        total[lane] += gain > 0.0f ? gain : 0.0f;
    }
}

/* sums[c] = sum over the points of max(0, near - distance to candidate c); later_sums the same with `later`, if any. */
static void *add_gains(void *given) {
    const work *w = given;
    int64_t block = BLOCK_FLOATS / (w->features * LANES) + 1;
    for (int64_t c = 0; c < w->count; c++) w->sums[c] = 0;
    for (int64_t c = 0; w->later && c < w->count; c++) w->later_sums[c] = 0;
    for (int64_t from = 0; from < w->panels; from += block) {
        int64_t to = from + block < w->panels ? from + block : w->panels;
        for (int64_t first = 0; first < w->count; first += TOGETHER) {
            const float *candidates = w->candidates + first * w->features;
            double total[TOGETHER][LANES] = {}, later[TOGETHER][LANES] = {};
            for (int64_t p = from; p < to; p++) {
                float distances[TOGETHER][LANES] __attribute__((aligned(4 * LANES)));
                measure(w->points + p * w->features * LANES, candidates, w->features, TOGETHER, (lanes *)distances);
                finish(distances[0], TOGETHER * LANES);
                for (int c = 0; c < TOGETHER; c++) {
                    add(w->near + p * LANES, distances[c], total[c]);
                    if (w->later) add(w->later + p * LANES, distances[c], later[c]);
                }
            }
            for (int c = 0; c < TOGETHER; c++)
                for (int lane = 0; lane < LANES; lane++) {
                    w->sums[first + c] += total[c][lane];
                    if (w->later) w->later_sums[first + c] += later[c][lane];
                }
        }
    }
    return NULL;
}

/* near = min(near, distance to the candidate); points that are nearer to it are now represented by `position`. */
static void *take(void *given) {
    const work *w = given;
    for (int64_t first = 0; first < w->panels; first += PANELS) {
        int64_t width = w->features * LANES, most = w->panels - 1;
        float squares[PANELS][LANES] __attribute__((aligned(4 * LANES))) = {};
        for (int64_t k = 0; k < w->features; k++)
            for (int p = 0; p < PANELS; p++) {
                int64_t panel = first + p < most ? first + p : most;
                lanes gap = *(const lanes *)(w->points + panel * width + k * LANES) - w->candidates[k];
                *(lanes *)squares[p] += gap * gap;
            }
        finish(squares[0], PANELS * LANES);
        for (int p = 0; p < PANELS && first + p < w->panels; p++) {
            float *near = w->near + (first + p) * LANES;
            int32_t *nearest = w->nearest + (first + p) * LANES;
#pragma omp simd
            for (int lane = 0; lane < LANES; lane++) {
                float distance = squares[p][lane];
                nearest[lane] = distance < near[lane] ? w->position : nearest[lane];
                near[lane] = distance < near[lane] ? distance : near[lane];
            }
        }
    }
    return NULL;
}

/* Run a task on as many threads; a part whose thread cannot be started runs in this one. */
static void run_parallel(void *(*task)(void *), work whole, double *sums, int64_t threads) {
    work parts[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int running[MOST_THREADS] = {0};
    for (int64_t t = 0; t < threads; t++) {
        int64_t from = whole.panels * t / threads, to = whole.panels * (t + 1) / threads;
        parts[t] = whole;
        parts[t].points += from * whole.features * LANES;
        parts[t].near += from * LANES;
        if (whole.later) parts[t].later += from * LANES;
        if (whole.nearest) parts[t].nearest += from * LANES;
        parts[t].panels = to - from;
        if (sums) parts[t].sums = sums + t * whole.count;
        if (whole.later) parts[t].later_sums = sums + (threads + t) * whole.count;
        if (t) running[t] = pthread_create(&started[t], NULL, task, &parts[t]) == 0;
    }
    for (int64_t t = 0; t < threads; t++)
        if (!running[t]) task(&parts[t]);
    for (int64_t t = 1; t < threads; t++)
        if (running[t]) pthread_join(started[t], NULL);
}

/* How many threads are worth starting for so many multiplications. */
static int64_t threads_for(int64_t numbers, int64_t most) {
    int64_t worth = numbers / WORK_PER_THREAD;
    return worth < 1 ? 1 : worth < most ? worth : most;
}

/* The points in panels; each one's distance to its representative, and which that is; and the largest number of
   threads. */
typedef struct {
    const float *points;
    float *near;
    int32_t *nearest;
    int64_t panels, features, threads;
} facility;

/* The gains of candidates, and, if `later` is given, what they would be if the points were as near as that.

   sums: [threads][count], twice as large with `later`. Returns the number of rows that were written, which the caller
   adds up; as many rows for `later` follow at [threads]. candidates: [count][features], count a multiple of TOGETHER.
   Padding of the last panel has near = 0, and so no gain. */
int64_t thinwire_gains(const facility *f, const float *later, const float *candidates, int64_t count, double *sums) {
    work whole = {.points = f->points, .candidates = candidates, .near = f->near, .later = later,
                  .panels = f->panels, .features = f->features, .count = count};
    int64_t used = threads_for(count * f->panels * f->features * LANES, f->threads);
    run_parallel(add_gains, whole, sums, used);
    return used;
}

void thinwire_take(const facility *f, const float *candidate, int32_t position) {
    work whole = {.points = f->points, .candidates = candidate, .near = f->near, .nearest = f->nearest,
                  .position = position, .panels = f->panels, .features = f->features};
    run_parallel(take, whole, NULL, threads_for(f->panels * f->features * LANES, f->threads));
}

/* -- lazy greedy -- */

/* A heap of candidates by their upper bounds, highest first; of equal ones the smallest number. */
typedef struct {
    int64_t *ids, size;
    double *bounds;
} heap;

static int before(const heap *h, int64_t a, int64_t b) {
    return h->bounds[a] > h->bounds[b] || (h->bounds[a] == h->bounds[b] && a < b);
}

static void push(heap *h, int64_t id) {
    int64_t place = h->size++;
    for (; place && before(h, id, h->ids[(place - 1) / 2]); place = (place - 1) / 2)
        h->ids[place] = h->ids[(place - 1) / 2];
    h->ids[place] = id;
}

static int64_t pop(heap *h) {
    int64_t first = h->ids[0], last = h->ids[--h->size], place = 0;
    for (int64_t child; (child = 2 * place + 1) < h->size; place = child) {
        if (child + 1 < h->size && before(h, h->ids[child + 1], h->ids[child])) child++;
        if (!before(h, h->ids[child], last)) break;
        h->ids[place] = h->ids[child];
    }
    h->ids[place] = last;
    return first;
}

static void copy_row(const float *points, int64_t features, int64_t point, float *row) {
    const float *panel = points + point / LANES * features * LANES + point % LANES;
    for (int64_t k = 0; k < features; k++) row[k] = panel[k * LANES];
}

/* The inputs and results of lazy greedy. `ids` is a heap of `size` candidates by `bounds`; `asked` is a buffer as
   large. `rows` is a buffer of [widest][features], `sums` of [threads][widest]; block and widest are multiples of
   TOGETHER. At most `picks` are made, the first of them with number `position`, and written to `picked` and `gains`. */
typedef struct {
    int64_t *ids, *asked, *picked;
    double *bounds, *sums, *gains;
    float *rows;
    int64_t size, block, widest, position, picks;
    double cost, enough;
} search;

/* Remove the candidate of the largest gain from the heap. A bound is an old gain, and gains only shrink: candidates are
   evaluated until no bound exceeds the best gain, in blocks, each twice as large as the last. */
static int64_t remove_best(const facility *f, const search *s, heap *h) {
    int64_t count = 0, best = -1, *asked = s->asked;
    work whole = {.points = f->points, .near = f->near, .panels = f->panels, .features = f->features};
    for (int64_t width = s->block;; width = 2 * width < s->widest ? 2 * width : s->widest) {
        int64_t first = count;
        while (count - first < width && h->size && (best < 0 || before(h, h->ids[0], best))) asked[count++] = pop(h);
        if (count == first) break;
        whole.count = (count - first + TOGETHER - 1) / TOGETHER * TOGETHER;
        for (int64_t c = first; c < count; c++)
            copy_row(f->points, f->features, asked[c], s->rows + (c - first) * f->features);
        int64_t threads = threads_for(whole.count * f->panels * f->features * LANES, f->threads);
        whole.candidates = s->rows;
        run_parallel(add_gains, whole, s->sums, threads);
        for (int64_t c = first; c < count; c++) {
            double gain = 0;
            for (int64_t t = 0; t < threads; t++) gain += s->sums[t * whole.count + c - first];
            h->bounds[asked[c]] = gain;
            if (best < 0 || before(h, asked[c], best)) best = asked[c];
        }
    }
    for (int64_t c = 0; c < count; c++)
        if (asked[c] != best) push(h, asked[c]);
    return best;
}

/* Pick until there are `picks` more, the cost is at most `enough`, or no candidate is left. Returns how many were
   picked; updates `size` and `cost`. */
int64_t thinwire_lazy(const facility *f, search *s) {
    heap h = {.ids = s->ids, .size = s->size, .bounds = s->bounds};
    int64_t done = 0;
    for (; done < s->picks && h.size && !(s->position + done > 0 && s->cost <= s->enough); done++) {
        int64_t best = remove_best(f, s, &h);
        int32_t position = (int32_t)(s->position + done);
        copy_row(f->points, f->features, best, s->rows);
        thinwire_take(f, s->rows, position);
        f->near[best] = 0;
        f->nearest[best] = position;
        s->picked[done] = best;
        s->gains[done] = s->bounds[best];
        s->cost -= s->bounds[best];
    }
    s->size = h.size;
    return done;
}

/* Points in a panel, candidates that are evaluated together, and the largest number of threads. */
int64_t thinwire_lanes(void) { return LANES; }
int64_t thinwire_together(void) { return TOGETHER; }
int64_t thinwire_most_threads(void) { return MOST_THREADS; }
