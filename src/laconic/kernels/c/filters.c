/* The gradients of filters, of many models: products over places, with channels beside each other. */

/* What serves all models of a call. */
typedef struct {
    /* Columns of the window lie together, unless there are gaps between them. */
    int64_t row, together, stretches, stretch, width;
    float *inside, *sums;
    int32_t *at;
} filters_plan;

/* One image's part of the gradient of all filters, [filters][width], in `stretches` of neighbours; and the call of
   another image, with what is above it. */
static void add_image(
    const shape *s, const filters_plan *p, const float *above, const float *next, const float *next_above
) {
    const int64_t groups = rounded(s->filters, ROWS) / ROWS, places = s->out[0] * s->out[1];
    const int64_t per_row = p->stretches / s->window[0], down = s->dilation[0] * p->row;
    /* A stretch of one vector for each row of the window: three rows at a time. */
    const int rows_together = WIDEST == 3 && p->stretch == LANES && per_row == 1 && s->window[0] % WIDEST == 0;
    const int64_t tiles = groups * p->stretches * rounded(p->stretch, COLUMNS) / COLUMNS / (rows_together ? WIDEST : 1);
    coming image = coming_from(next, s->channels * s->in[0] * s->in[1], tiles);
    coming sent = coming_from(next_above, s->filters * places, tiles);
    for (int64_t o = 0; o < s->filters; o += ROWS) {
        const float *factors[ROWS];
        float *to = p->sums + o * p->width;
        rows_at(above + o * places, places, least(s->filters - o, ROWS), factors);
        for (int64_t t = 0; t < p->stretches; t += rows_together ? WIDEST : 1) {
            const float *from = p->inside + t / per_row * down + t % per_row * s->dilation[1] * s->channels;
            for (int64_t v = 0, now; v < p->stretch; v += now * LANES) {
                call(&image), call(&sent);
                now = rows_together ? WIDEST : vectors_of((p->stretch - v) / LANES);
                PRODUCTS[now - 1](
                    factors, from + v, p->at, places, rows_together ? down : LANES, 0, to + t * p->stretch + v,
                    p->width, 0
                );
            }
        }
    }
}

static filters_plan prepare_filters(const shape *s, char **room, int real) {
    const int64_t row = (s->in[1] + 2 * s->padding[1]) * s->channels;
    const int64_t size = row * (s->in[0] + 2 * s->padding[0]) + 3 * LANES;
    const int64_t together = s->dilation[1] == 1 ? s->window[1] : 1;
    filters_plan p = {.row = row, .together = together, .stretches = s->window[0] * s->window[1] / together};
    p.stretch = rounded(together * s->channels, LANES), p.width = p.stretches * p.stretch;
    p.inside = taken(room, size * 4), p.sums = taken(room, rounded(s->filters, ROWS) * p.width * 4);
    p.at = taken(room, s->out[0] * s->out[1] * 4);
    if (!real) return p;
    memset(p.inside, 0, (size_t)size * sizeof(float));
    for (int64_t i = 0, place = 0; i < s->out[0]; i++)
        for (int64_t j = 0; j < s->out[1]; j++, place++)
            p.at[place] = (int32_t)(i * s->stride[0] * row + j * s->stride[1] * s->channels);
    return p;
}

/* One model's gradients of w and of the shifts; and the call of the gradient of y that comes after. */
static void filters_of(
    const shape *s, const filters_plan *p, const float *x, const float *gradient, const float *after, float *of_w,
    float *of_shift
) {
    const int64_t channels = s->channels, places = s->out[0] * s->out[1], window = s->window[0] * s->window[1];
    memset(p->sums, 0, (size_t)(rounded(s->filters, ROWS) * p->width) * sizeof(float));
    memset(of_shift, 0, (size_t)s->filters * sizeof(float));
    for (int64_t n = 0; n < s->samples; n++) {
        const float *image = x + n * s->x_sample, *above = gradient + n * s->y_sample;
        const int last = n + 1 == s->samples;
        float *to = p->inside + s->padding[0] * p->row + s->padding[1] * channels;
        for (int64_t i = 0; i < s->in[0]; i++)
            transpose(image + i * s->in[1], channels, s->in[1], s->in[0] * s->in[1], to + i * p->row, channels);
        add_image(s, p, above, last ? 0 : image + s->x_sample, last ? after : above + s->y_sample);
        for (int64_t o = 0; o < s->filters; o++) of_shift[o] += total(above + o * places, places);
    }
    for (int64_t o = 0; o < s->filters; o++)
        for (int64_t t = 0; t < p->stretches; t++)
            transpose(
                p->sums + o * p->width + t * p->stretch, p->together, channels, channels,
                of_w + o * channels * window + t * p->together, window
            );
}

/* The gradients of w and of the shifts from that of y; without room, the bytes of it that are needed. */
int64_t laconic_convolve_filters(
    const float *x, const float *gradient, float *of_w, float *of_shift, const shape *s, int64_t models, char *room
) {
    char *begin = room;
    const filters_plan p = prepare_filters(s, &room, begin != 0);
    if (!begin) return room - begin;
    const int64_t weights = s->filters * s->channels * s->window[0] * s->window[1];
    for (int64_t b = 0; b < models; b++)
        filters_of(
            s, &p, x + b * s->x_model, gradient + b * s->y_model,
            b + 1 < models ? gradient + (b + 1) * s->y_model : 0, of_w + b * weights, of_shift + b * s->filters
        );
    return 0;
}

/* All three gradients, model by model, while one's gradient of y is in the caches. The steps of x itself are `x_model`
   and `x_sample`, those of its gradient are with the shape. */
int64_t laconic_convolve_back(
    const float *x, const float *gradient, const float *w, float *of_w, float *of_shift, float *of_x, const shape *s,
    int64_t x_model, int64_t x_sample, int64_t models, char *room
) {
    char *begin = room;
    const way_back back = prepare_back(s, &room, begin != 0);
    shape read = *s;
    read.x_model = x_model, read.x_sample = x_sample;
    const filters_plan p = prepare_filters(&read, &room, begin != 0);
    if (!begin) return room - begin;
    const int64_t weights = s->filters * s->channels * s->window[0] * s->window[1];
    for (int64_t b = 0; b < models; b++) {
        const float *image = x + b * x_model, *above = gradient + b * s->y_model;
        const float *after = b + 1 < models ? above + s->y_model : 0;
        send_back(s, &back, above, image, w + b * weights, 0, of_x + b * s->x_model);
        filters_of(&read, &p, image, above, after, of_w + b * weights, of_shift + b * s->filters);
    }
    settle();
    return 0;
}
