/* The gradients of the weights of linear layers, of many models: more numbers than anything else that a pass writes. */

/* What a layer looks like: rows of each model's x, what they hold and what comes of them. */
typedef struct {
    int64_t rows, in, out, x_model, y_model, away;
} layer;

/* The gradients of w and of the shifts from that of y; without room, the bytes of it that are needed. */
int64_t laconic_linear_weights(
    const float *x, const float *gradient, float *of_w, float *of_shift, const layer *l, int64_t models, char *room
) {
    char *begin = room;
    float *turned = taken(&room, l->out * l->rows * 4), *panel = taken(&room, (l->rows * COLUMNS + LANES) * 4);
    int32_t *at = taken(&room, l->rows * 4);
    if (!begin) return room - begin;
    memset(panel, 0, (size_t)(l->rows * COLUMNS + LANES) * sizeof(float));
    coming none = coming_from(0, 0, 1);
    for (int64_t i = 0; i < l->rows; i++) at[i] = (int32_t)(i * COLUMNS);
    for (int64_t b = 0; b < models; b++) {
        const float *own = x + b * l->x_model;
        float *to = of_w + b * l->out * l->in;
        transpose(gradient + b * l->y_model, l->rows, l->out, l->out, turned, l->rows);
        for (int64_t o = 0; o < l->out; o++) of_shift[b * l->out + o] = total(turned + o * l->rows, l->rows);
        for (int64_t c = 0, columns; c < l->in; c += columns) {
            columns = columns_from(c, l->in);
            for (int64_t i = 0; i < l->rows; i++) copy_row(own + i * l->in + c, columns, panel + i * COLUMNS);
            block_of(
                panel, at, l->rows, LANES, turned, l->rows, 0, 1, l->away != 0, l->out, to + c, l->in, columns, &none
            );
        }
    }
    settle();
    return 0;
}
