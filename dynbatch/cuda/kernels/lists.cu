// Lists: what fused kernels do not compute of them.

// One where an element of a row's list is the first that attains the list's maximum, else zero. A thread for each
// element of a row's value; elements lie at offsets[e] + place, or e * stride + place; results at start, start + step...
extern "C" __global__ void segment_first(real* mem, integer rows, integer start, integer step, OPERAND(x), int width,
                                         const integer* boundaries) {
    ROW_AND_ELEMENT(r, j, width);
    real top = -infinity();
    for (integer e = boundaries[r]; e < boundaries[r + 1]; ++e) top = math::greatest(top, ROW_OF(x, e)[j]);
    bool found = false;
    for (integer e = boundaries[r]; e < boundaries[r + 1]; ++e) {
        const bool here = !found && ROW_OF(x, e)[j] == top;
        found = found || here;
        mem[start + e * step + j] = here ? real(1) : real(0);
    }
}
