/* Convolutions of many models, each with its own filters, as products of filters with the patches that they see.

   Patches are not written out for a whole image, as `unfold` does: where sixteen neighbours lie together they are read
   from the image itself, and elsewhere gathered for a few places at a time, which stay in the nearest cache. Every
   result goes to its place at once. */

/* The most weights of which patches are gathered at once: with their filters they fit the nearest cache. */
#define DEPTH 192

/* What a convolution looks like, and how far its models and samples lie apart; rows first, then columns. */
typedef struct {
    int64_t samples, channels, filters;
    int64_t in[2], out[2], window[2], stride[2], padding[2], dilation[2];
    int64_t x_model, x_sample, y_model, y_sample;
    int64_t away; /* whether results are more than caches hold */
} shape;

INLINE int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Room of the caller's, in whole vectors. */
static void *taken(char **room, int64_t bytes) {
    char *found = *room;
    *room += rounded(bytes, 64);
    return found;
}

/* -- images in a frame of zeros; less than none of it cuts the image -- */

/* Where every s-th column is looked at, columns of one remainder lie together. */
typedef struct {
    int64_t plane, part, row, size;
} frame;

INLINE int64_t reach(const shape *s, int i) {
    const int64_t needed = (s->out[i] - 1) * s->stride[i] + s->dilation[i] * (s->window[i] - 1) + 1;
    return needed > s->in[i] + s->padding[i] ? needed : s->in[i] + s->padding[i];
}

static frame framed(const shape *s) {
    const int64_t row = rounded(reach(s, 1), s->stride[1]) / s->stride[1], part = row * reach(s, 0);
    /* An odd number of cache lines, that channels do not fall on each other. */
    const int64_t plane = (rounded(part * s->stride[1], LANES) / LANES | 1) * LANES;
    return (frame){plane, part, row, plane * s->channels + COLUMNS};
}

INLINE void copy_row(const float *from, int64_t n, float *to) {
    if (n < LANES) {
        if (n > 0) memcpy(to, from, (size_t)n * sizeof(float));
    } else {
        for (int64_t j = 0; j + LANES < n; j += LANES) store(to + j, load(from + j));
        store(to + n - LANES, load(from + n - LANES));
    }
}

static void put_into_frame(const shape *s, frame f, const float *x, float *into) {
    const int64_t step = s->stride[1], over = s->padding[0] < 0 ? -s->padding[0] : 0;
    const int64_t first = s->padding[1] < 0 ? -s->padding[1] : 0;
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t i = over; i < s->in[0]; i++) {
            float *to = into + c * f.plane + (i + s->padding[0]) * f.row;
            const float *from = x + (c * s->in[0] + i) * s->in[1];
            if (step == 1) copy_row(from + first, s->in[1] - first, to + s->padding[1] + first);
            else
                for (int64_t j = first; j < s->in[1]; j++) {
                    const int64_t place = j + s->padding[1];
                    to[place % step * f.part + place / step] = from[j];
                }
        }
}

/* Where in the frame each weight of a filter finds its number, for the first place. */
static void taps(const shape *s, frame f, int32_t *at) {
    const int64_t step = s->stride[1];
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t i = 0; i < s->window[0]; i++)
            for (int64_t j = 0; j < s->window[1]; j++) {
                const int64_t right = j * s->dilation[1];
                *at++ = (int32_t)(c * f.plane + right % step * f.part + i * s->dilation[0] * f.row + right / step);
            }
}

/* Neighbours among the places of a block: where they are, at most LANES of them together. */
typedef struct {
    int32_t from, to;
} run;

INLINE int64_t columns_from(int64_t begin, int64_t places) {
    return least(LANES * vectors_of(rounded(places - begin, LANES) / LANES), places - begin);
}

static void runs_of(const shape *s, frame f, run *every, int32_t *first) {
    const int64_t places = s->out[0] * s->out[1];
    int32_t count = 0;
    for (int64_t begin = 0, end; begin < places; begin = end) {
        *first++ = count;
        end = begin + columns_from(begin, places);
        for (int64_t place = begin; place < end;) {
            const int64_t i = place / s->out[1], j = place % s->out[1];
            every[count++] = (run){(int32_t)(i * s->stride[0] * f.row + j), (int32_t)(place - begin)};
            place += least(s->out[1] - j, LANES);
        }
    }
    *first = count;
}

/* Whether the vectors of a block are whole and equally far apart, and how far; else zero. */
static int64_t apart(const run *every, int64_t runs, int64_t columns) {
    if (columns != runs * LANES) return 0;
    const int64_t far = runs > 1 ? every[1].from - every[0].from : LANES;
    for (int64_t k = 0; k < runs; k++)
        if (every[k].from != every[0].from + k * far) return 0;
    return far;
}

/* Numbers beyond a run's end are overwritten by the next. */
static void gather(const float *from, const int32_t *at, int64_t count, const run *every, int64_t runs, float *to) {
    for (int64_t i = 0; i < count; i++, to += COLUMNS)
        for (int64_t k = 0; k < runs; k++) store(to + every[k].to, load(from + at[i] + every[k].from));
}

/* -- forward -- */

/* What serves all images of a call; one that needs no frame is read where it is. */
typedef struct {
    shape s;
    frame f;
    int bare;
    int32_t *at, *first;
    run *every;
    float *inside, *patches;
    int32_t steps[DEPTH];
} plan;

static void prepare(plan *p, const shape *s, char **room, int real) {
    const int64_t weights = s->channels * s->window[0] * s->window[1], places = s->out[0] * s->out[1];
    p->s = *s;
    p->bare = !s->padding[0] && !s->padding[1] && s->stride[1] == 1 && s->out[1] % LANES == 0 &&
              reach(s, 0) == s->in[0] && reach(s, 1) == s->in[1];
    p->f = p->bare ? (frame){s->in[0] * s->in[1], 0, s->in[1], 0} : framed(s);
    p->inside = taken(room, p->f.size * 4), p->patches = taken(room, (DEPTH * COLUMNS + LANES) * 4);
    p->at = taken(room, weights * 4), p->first = taken(room, (rounded(places, LANES) / LANES + 1) * 4);
    p->every = taken(room, (places + rounded(places, LANES) / LANES) * (int64_t)sizeof(run));
    if (!real) return;
    memset(p->inside, 0, (size_t)((char *)p->at - (char *)p->inside));
    for (int32_t i = 0; i < DEPTH; i++) p->steps[i] = i * COLUMNS;
    taps(s, p->f, p->at);
    runs_of(s, p->f, p->every, p->first);
}

/* One block of places of all filters, from patches whose vectors are `far` apart. */
static void block_of(
    const float *patches, const int32_t *at, int64_t depth, int64_t far, const float *w, int64_t weights,
    const float *shift, int first, int away, int64_t filters, float *y, int64_t places, int64_t columns, coming *next
) {
    const int64_t vectors = rounded(columns, LANES) / LANES;
    for (int64_t o = 0; o < filters; o += ROWS) {
        const int64_t rows = least(filters - o, ROWS);
        const float *factors[ROWS];
        float start[ROWS] = {0}, rest[ROWS * COLUMNS], *to = y + o * places;
        const int whole = columns == vectors * LANES && (rows == ROWS || rows == FEW);
        rows_at(w + o * weights, weights, rows, factors);
        call(next);
        if (first && shift)
            for (int64_t r = 0; r < rows; r++) start[r] = shift[o + r];
        if (!whole && !first)
            for (int64_t r = 0; r < rows; r++)
                memcpy(rest + r * COLUMNS, to + r * places, (size_t)columns * sizeof(float));
        (rows <= FEW ? FEW_PRODUCTS : PRODUCTS)[vectors - 1](
            factors, patches, at, depth, far, first ? start : 0, whole ? to : rest, whole ? places : COLUMNS,
            away && whole && !(places % LANES) && !((uintptr_t)to % sizeof(floats))
        );
        if (!whole)
            for (int64_t r = 0; r < rows; r++)
                memcpy(to + r * places, rest + r * COLUMNS, (size_t)columns * sizeof(float));
    }
}

static void one_image(
    const plan *p, const float *x, const float *next, const float *w, const float *shift, float *y
) {
    const shape *s = &p->s;
    const int64_t places = s->out[0] * s->out[1], weights = s->channels * s->window[0] * s->window[1];
    const int64_t tiles = rounded(places, COLUMNS) / COLUMNS * (rounded(s->filters, ROWS) / ROWS);
    const int away = s->away != 0;
    coming soon = coming_from(next, s->channels * s->in[0] * s->in[1], tiles);
    if (!p->bare) put_into_frame(s, p->f, x, p->inside);
    const float *image = p->bare ? x : p->inside;
    for (int64_t begin = 0, block = 0, columns; begin < places; begin += columns, block++) {
        const run *every = p->every + p->first[block];
        const int64_t runs = p->first[block + 1] - p->first[block];
        columns = columns_from(begin, places);
        const int64_t far = p->bare ? 0 : apart(every, runs, columns);
        if (far) {
            const float *patches = image + every[0].from;
            block_of(
                patches, p->at, weights, far, w, weights, shift, 1, away, s->filters, y + begin, places, columns, &soon
            );
            continue;
        }
        for (int64_t done = 0; done < weights; done += DEPTH) {
            const int64_t depth = least(weights - done, DEPTH);
            const int last = done + depth == weights;
            gather(image, p->at + done, depth, every, runs, p->patches);
            block_of(
                p->patches, p->steps, depth, LANES, w + done, weights, shift, !done, away && last, s->filters,
                y + begin, places, columns, &soon
            );
        }
    }
}

/* y of each model; without room, the bytes of it that are needed. */
int64_t laconic_convolve(
    const float *x, const float *w, const float *shift, float *y, const shape *s, int64_t models, char *room
) {
    char *begin = room;
    plan p;
    prepare(&p, s, &room, begin != 0);
    if (!begin) return room - begin;
    const int64_t weights = s->filters * s->channels * s->window[0] * s->window[1];
    for (int64_t b = 0; b < models; b++) {
        const float *moved = shift ? shift + b * s->filters : 0;
        for (int64_t n = 0; n < s->samples; n++) {
            const float *image = x + b * s->x_model + n * s->x_sample;
            const float *after = b + 1 < models ? x + (b + 1) * s->x_model : 0;
            const float *next = n + 1 < s->samples ? image + s->x_sample : after;
            one_image(&p, image, next, w + b * weights, moved, y + b * s->y_model + n * s->y_sample);
        }
    }
    settle();
    return 0;
}
