"""Triton kernels of the fused engine: Conv4's passes for many tasks at once, each task with weights of its own.

Activations are channels-last with a border of zeros one pixel wide, so that a 3x3 convolution reads its nine
neighbours without bounds checks. ``job`` counts tasks. Sums are kept in float32 and collected with atomic adds.
Conventions: M pixels of all images of a job, C channels, a = gamma * rstd and b = beta - mean * a of batch norm.
"""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-5)  # of batch norm
DEAD = tl.constexpr(4)  # stands for the place of the maximum where ReLU passes nothing


@triton.jit
def _stored(value, at):
    """As the memory at a pointer holds it; float16 takes its largest number for larger ones."""
    if at.dtype.element_ty == tl.float16:
        value = tl.clamp(value, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return value.to(at.dtype.element_ty)


@triton.jit
def gram(x, out, rows, K: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr):
    """out[job] += x^T x over a block of rows of x[job, rows, K]."""
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K)
    x += job * rows * K
    total = tl.zeros((K, K), tl.float32)
    for number in range(STEPS):
        row = (block * STEPS + number) * ROWS + tl.arange(0, ROWS)
        tile = tl.load(x + row[:, None] * K + k[None, :], mask=row[:, None] < rows, other=0.0)
        total += tl.dot(tl.trans(tile), tile, input_precision=PRECISION)
    tl.atomic_add(out + job * K * K + k[:, None] * K + k[None, :], total, sem="relaxed")


@triton.jit
def _patch_statistics(moments, weights, job, count, K: tl.constexpr, C: tl.constexpr, ONES: tl.constexpr):
    """Mean, variance and Cov @ W of a linear map of patches, from the patches' second moments alone."""
    k, other = tl.arange(0, K), tl.arange(0, K)
    second = tl.load(moments + job * K * K + k[:, None] * K + other[None, :]) / count
    first = tl.load(moments + job * K * K + ONES * K + k) / count
    covariance = second - first[:, None] * first[None, :]
    mapped = tl.dot(covariance, weights, input_precision="ieee")
    mean = tl.sum(first[:, None] * weights, 0)
    variance = tl.maximum(tl.sum(weights * mapped, 0), 0.0)
    return first, mapped, mean, variance


@triton.jit
def first_block_statistics(
    moments, weights, gamma, beta, parameters_per_job, scale_and_shift, count,
    K: tl.constexpr, C: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """a and b of the first batch norm, scale_and_shift[job, 2, C]."""
    job = tl.program_id(0).to(tl.int64)
    k, c = tl.arange(0, K), tl.arange(0, C)
    own = job * parameters_per_job
    w = tl.load(weights + own + k[:, None] * C + c[None, :]).to(tl.float32)
    _, _, mean, variance = _patch_statistics(moments, w, job, count, K, C, ONES)
    scale = tl.load(gamma + own + c) / tl.sqrt(variance + EPSILON)
    tl.store(scale_and_shift + job * 2 * C + c, scale)
    tl.store(scale_and_shift + job * 2 * C + C + c, tl.load(beta + own + c) - mean * scale)


@triton.jit
def first_block(
    patches, scale_and_shift, weights, parameters_per_job, out, winner, pooled, side,
    K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolution of patches, batch norm, ReLU and 2x2 max-pool in one pass; nothing of full size is written.

    patches[job, corner of the pooling window, pooled pixel, K]; out is bordered, winner is not.
    """
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, c = tl.arange(0, K), tl.arange(0, C)
    patches += job * 4 * pooled * K
    winner += job * pooled * C
    out += job * (pooled // (side * side)) * (side + 2) * (side + 2) * C
    w = tl.load(weights + job * parameters_per_job + k[:, None] * C + c[None, :])
    scale = tl.load(scale_and_shift + job * 2 * C + c)
    shift = tl.load(scale_and_shift + job * 2 * C + C + c)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row[:, None] < pooled
    best = tl.zeros((ROWS, C), tl.float32)
    place = tl.full((ROWS, C), DEAD, tl.int8)
    for corner in tl.static_range(4):
        x = tl.load(patches + (corner * pooled + row[:, None]) * K + k[None, :], mask=inside, other=0.0)
        z = tl.dot(x, w, input_precision=PRECISION) * scale[None, :] + shift[None, :]
        higher = z > best
        best = tl.where(higher, z, best)
        place = tl.where(higher, corner, place).to(tl.int8)
    image, pixel = row // (side * side), row % (side * side)
    bordered = (image * (side + 2) + pixel // side + 1) * (side + 2) + pixel % side + 1
    tl.store(out + bordered[:, None] * C + c[None, :], _stored(best, out), mask=inside)
    tl.store(winner + row[:, None] * C + c[None, :], place, mask=inside)


@triton.jit
def first_block_weight_sums(
    patches, upstream, winner, out, accumulators_per_job, pooled,
    K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[job, K, C] += sum over pixels of patch (x) gradient, where the gradient passed ReLU and pooling."""
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, c = tl.arange(0, K), tl.arange(0, C)
    patches += job * 4 * pooled * K
    upstream += job * pooled * C
    winner += job * pooled * C
    total = tl.zeros((K, C), tl.float32)
    for number in range(STEPS):
        row = (block * STEPS + number) * ROWS + tl.arange(0, ROWS)
        inside = row[:, None] < pooled
        at = row[:, None] * C + c[None, :]
        gradient = tl.load(upstream + at, mask=inside, other=0.0)
        place = tl.load(winner + at, mask=inside, other=DEAD)
        for corner in tl.static_range(4):
            x = tl.load(patches + (corner * pooled + row[:, None]) * K + k[None, :], mask=inside, other=0.0)
            passed = tl.where(place == corner, gradient, 0.0).to(x.dtype)
            total += tl.dot(tl.trans(x), passed, input_precision=PRECISION)
    tl.atomic_add(out + job * accumulators_per_job + k[:, None] * C + c[None, :], total, sem="relaxed")


@triton.jit
def first_block_gradient(
    moments, sums, weights, gamma, parameters_per_job, weight_gradient, gamma_gradient, beta_gradient,
    accumulators_per_job, count, K: tl.constexpr, C: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Batch norm's backward pass and the weight gradient of the first block, from sums over pixels alone."""
    job = tl.program_id(0).to(tl.int64)
    k, c = tl.arange(0, K), tl.arange(0, C)
    own = job * parameters_per_job
    w = tl.load(weights + own + k[:, None] * C + c[None, :]).to(tl.float32)
    first, mapped, mean, variance = _patch_statistics(moments, w, job, count, K, C, ONES)
    rstd = 1.0 / tl.sqrt(variance + EPSILON)
    scale = tl.load(gamma + own + c).to(tl.float32) * rstd
    mine = job * accumulators_per_job
    passed = tl.load(sums + mine + k[:, None] * C + c[None, :])
    to_shift = tl.load(sums + mine + ONES * C + c)
    to_scale = (tl.sum(passed * w, 0) - mean * to_shift) * rstd
    gradient = scale[None, :] * (passed - to_shift[None, :] * first[:, None] - (to_scale * rstd)[None, :] * mapped)
    tl.store(weight_gradient + mine + k[:, None] * C + c[None, :], gradient)
    tl.store(gamma_gradient + mine + c, to_scale)
    tl.store(beta_gradient + mine + c, to_shift)


@triton.jit
def convolution(
    x, weights, parameters_per_job, out, total, squares, accumulators_per_job, pixels, side,
    C: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """3x3 convolution of a bordered x[job]; forward also adds up the outputs and their squares by channel.

    weights[job, tap, C in, C out]. BACKWARD is the transposed convolution: taps mirrored, weights transposed.
    """
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, i = tl.arange(0, C), tl.arange(0, C)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < pixels
    safe = tl.where(inside, row, 0)
    image, pixel = safe // (side * side), safe % (side * side)
    y, z = pixel // side, pixel % side
    corner = (image * (side + 2) + y) * (side + 2) + z  # of the 3x3 neighbourhood
    x += job * (pixels // (side * side)) * (side + 2) * (side + 2) * C
    neighbour = x + corner[:, None] * C + i[None, :]
    own = weights + job * parameters_per_job
    result = tl.zeros((ROWS, C), tl.float32)
    for tap in range(9):
        tile = tl.load(neighbour + ((tap // 3) * (side + 2) + tap % 3) * C)
        if BACKWARD:
            w = tl.load(own + (8 - tap) * C * C + c[None, :] * C + i[:, None])
        else:
            w = tl.load(own + tap * C * C + i[:, None] * C + c[None, :])
        result = tl.dot(tile, w, result, input_precision=PRECISION)
    out += job * pixels * C
    tl.store(out + row[:, None] * C + c[None, :], _stored(result, out), mask=inside[:, None])
    if not BACKWARD:
        kept = tl.where(inside[:, None], result, 0.0)
        mine = job * accumulators_per_job + c
        tl.atomic_add(total + mine, tl.sum(kept, 0), sem="relaxed")
        tl.atomic_add(squares + mine, tl.sum(kept * kept, 0), sem="relaxed")


@triton.jit
def convolution_weight_gradient(
    x, upstream, out, accumulators_per_job, pixels, side,
    C: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[job, tap, C in, C out] += sum over pixels, for the three taps of one row; x and upstream are bordered."""
    block, line, job = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c, i = tl.arange(0, C), tl.arange(0, C)
    bordered = job * (pixels // (side * side)) * (side + 2) * (side + 2) * C
    x += bordered
    upstream += bordered
    left = tl.zeros((C, C), tl.float32)
    middle = tl.zeros((C, C), tl.float32)
    right = tl.zeros((C, C), tl.float32)
    for number in range(STEPS):
        row = (block * STEPS + number) * ROWS + tl.arange(0, ROWS)
        inside = row < pixels
        safe = tl.where(inside, row, 0)
        image, pixel = safe // (side * side), safe % (side * side)
        corner = (image * (side + 2) + pixel // side) * (side + 2) + pixel % side
        gradient = tl.load(upstream + (corner[:, None] + side + 3) * C + c[None, :], mask=inside[:, None], other=0.0)
        neighbour = x + (corner[:, None] + line * (side + 2)) * C + i[None, :]
        left = tl.dot(tl.trans(tl.load(neighbour)), gradient, left, input_precision=PRECISION)
        middle = tl.dot(tl.trans(tl.load(neighbour + C)), gradient, middle, input_precision=PRECISION)
        right = tl.dot(tl.trans(tl.load(neighbour + 2 * C)), gradient, right, input_precision=PRECISION)
    mine = out + job * accumulators_per_job + line * 3 * C * C + i[:, None] * C + c[None, :]
    tl.atomic_add(mine, left, sem="relaxed")
    tl.atomic_add(mine + C * C, middle, sem="relaxed")
    tl.atomic_add(mine + 2 * C * C, right, sem="relaxed")


@triton.jit
def _mean_and_rstd(total, squares, job, accumulators_per_job, pixels, C: tl.constexpr):
    mine = job * accumulators_per_job + tl.arange(0, C)
    mean = tl.load(total + mine) / pixels
    variance = tl.maximum(tl.load(squares + mine) / pixels - mean * mean, 0.0)
    return mean, 1.0 / tl.sqrt(variance + EPSILON)


@triton.jit
def normalise_and_pool(
    x, total, squares, accumulators_per_job, gamma, beta, parameters_per_job, out, winner,
    pixels, side, pooled, pooled_side, out_border, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Batch norm, ReLU and 2x2 max-pool of x[job, pixels, C], which has no border."""
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, C)
    own = job * parameters_per_job + c
    mean, rstd = _mean_and_rstd(total, squares, job, accumulators_per_job, pixels, C)
    scale = tl.load(gamma + own).to(tl.float32) * rstd
    shift = tl.load(beta + own).to(tl.float32) - mean * scale
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row[:, None] < pooled
    area = pooled_side * pooled_side
    image, pixel = row // area, row % area
    y, z = pixel // pooled_side, pixel % pooled_side
    x += job * pixels * C
    winner += job * pooled * C
    window = (image * side + 2 * y) * side + 2 * z
    best = tl.zeros((ROWS, C), tl.float32)
    place = tl.full((ROWS, C), DEAD, tl.int8)
    for corner in tl.static_range(4):
        at = window + (corner // 2) * side + corner % 2
        value = tl.load(x + at[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = value * scale[None, :] + shift[None, :]
        higher = value > best
        best = tl.where(higher, value, best)
        place = tl.where(higher, corner, place).to(tl.int8)
    wide = pooled_side + 2 * out_border
    out += job * (pooled // area) * wide * wide * C
    to = (image * wide + y + out_border) * wide + z + out_border
    tl.store(out + to[:, None] * C + c[None, :], _stored(best, out), mask=inside)
    tl.store(winner + row[:, None] * C + c[None, :], place, mask=inside)


@triton.jit
def norm_gradient(
    x, total, squares, upstream, winner, gamma_gradient, beta_gradient, accumulators_per_job,
    pixels, side, pooled, pooled_side, C: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Gradients of batch norm's scale and shift: sums over the pixels that ReLU and pooling let through."""
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, C)
    mean, rstd = _mean_and_rstd(total, squares, job, accumulators_per_job, pixels, C)
    x += job * pixels * C
    upstream += job * pooled * C
    winner += job * pooled * C
    to_shift = tl.zeros((C,), tl.float32)
    to_scale = tl.zeros((C,), tl.float32)
    for number in range(STEPS):
        row = (block * STEPS + number) * ROWS + tl.arange(0, ROWS)
        inside = row[:, None] < pooled
        at = row[:, None] * C + c[None, :]
        place = tl.load(winner + at, mask=inside, other=DEAD).to(tl.int32)
        alive = place < DEAD
        gradient = tl.load(upstream + at, mask=alive, other=0.0).to(tl.float32)
        image, pixel = row // (pooled_side * pooled_side), row % (pooled_side * pooled_side)
        y, z = pixel // pooled_side, pixel % pooled_side
        window = (image * side + 2 * y) * side + 2 * z
        source = window[:, None] + (place // 2) * side + place % 2
        value = tl.load(x + source * C + c[None, :], mask=alive, other=0.0).to(tl.float32)
        to_shift += tl.sum(gradient, 0)
        to_scale += tl.sum(gradient * (value - mean[None, :]) * rstd[None, :], 0)
    mine = job * accumulators_per_job + c
    tl.atomic_add(beta_gradient + mine, to_shift, sem="relaxed")
    tl.atomic_add(gamma_gradient + mine, to_scale, sem="relaxed")


@triton.jit
def norm_backward(
    x, total, squares, upstream, winner, gamma, parameters_per_job, gamma_gradient, beta_gradient,
    accumulators_per_job, out, pixels, side, pooled, pooled_side, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of the convolution's output, bordered, through pooling, ReLU and batch norm."""
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, C)
    mean, rstd = _mean_and_rstd(total, squares, job, accumulators_per_job, pixels, C)
    scale = tl.load(gamma + job * parameters_per_job + c).to(tl.float32) * rstd
    mine = job * accumulators_per_job + c
    to_shift, to_scale = tl.load(beta_gradient + mine) / pixels, tl.load(gamma_gradient + mine) / pixels
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < pixels
    image, pixel = row // (side * side), row % (side * side)
    y, z = pixel // side, pixel % side
    covered = inside & (y < 2 * pooled_side) & (z < 2 * pooled_side)  # an odd side loses its last line to pooling
    x += job * pixels * C
    upstream += job * pooled * C
    winner += job * pooled * C
    window = (image * pooled_side + y // 2) * pooled_side + z // 2
    at = window[:, None] * C + c[None, :]
    place = tl.load(winner + at, mask=covered[:, None], other=DEAD)
    passes = place == ((y % 2) * 2 + z % 2)[:, None]
    gradient = tl.load(upstream + at, mask=passes, other=0.0).to(tl.float32)
    value = tl.load(x + row[:, None] * C + c[None, :], mask=inside[:, None], other=0.0)
    normalised = (value.to(tl.float32) - mean[None, :]) * rstd[None, :]
    result = scale[None, :] * (gradient - to_shift[None, :] - normalised * to_scale[None, :])
    out += job * (pixels // (side * side)) * (side + 2) * (side + 2) * C
    to = (image * (side + 2) + y + 1) * (side + 2) + z + 1
    tl.store(out + to[:, None] * C + c[None, :], _stored(result, out), mask=inside[:, None])


@triton.jit
def head_loss(
    features, weights, bias, parameters_per_job, labels, probabilities, logit_gradient, bias_gradient,
    accumulators_per_job, losses, images, ways, gradient_scale,
    width: tl.constexpr, IMAGES: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits, softmax, mean cross-entropy and its gradient for all images of a job.

    features[job, images, width], weights[job, ways, width]; probabilities and logit_gradient are padded. All
    gradients are ``gradient_scale`` times too large from here on.
    """
    job = tl.program_id(0).to(tl.int64)
    n, w, f = tl.arange(0, IMAGES), tl.arange(0, WAYS), tl.arange(0, CHUNK)
    logits = tl.zeros((IMAGES, WAYS), tl.float32)
    for start in range(0, width, CHUNK):
        x = tl.load(
            features + (job * images + n[:, None]) * width + start + f[None, :],
            mask=(n[:, None] < images) & (start + f[None, :] < width), other=0.0,
        ).to(tl.float32)  # fmt: skip
        weight = tl.load(
            weights + job * parameters_per_job + w[None, :] * width + start + f[:, None],
            mask=(w[None, :] < ways) & (start + f[:, None] < width), other=0.0,
        ).to(tl.float32)  # fmt: skip
        logits = tl.dot(x, weight, logits, input_precision=PRECISION)
    logits += tl.load(bias + job * parameters_per_job + w, mask=w < ways, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(w[None, :] < ways, logits, float("-inf"))
    logits = logits - tl.max(logits, 1)[:, None]
    exponentials = tl.exp(logits)
    sums = tl.sum(exponentials, 1)
    chances = exponentials / sums[:, None]
    label = tl.load(labels + job * images + n, mask=n < images, other=0)
    right = (w[None, :] == label[:, None]) & (n[:, None] < images)
    own = tl.sum(tl.where(right, logits, 0.0), 1) - tl.log(sums)
    tl.store(losses + job, -tl.sum(tl.where(n < images, own, 0.0), 0) / images)
    gradient = (chances - tl.where(right, 1.0, 0.0)) * (gradient_scale / images)
    gradient = tl.where(n[:, None] < images, gradient, 0.0)
    at = (job * IMAGES + n[:, None]) * WAYS + w[None, :]
    tl.store(probabilities + at, chances)
    tl.store(logit_gradient + at, gradient)
    tl.store(bias_gradient + job * accumulators_per_job + w, tl.sum(gradient, 0), mask=w < ways)


@triton.jit
def head_backward(
    features, weights, parameters_per_job, logit_gradient, weight_gradient, accumulators_per_job, feature_gradient,
    images, width, ways, IMAGES: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, job = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n, w, f = tl.arange(0, IMAGES), tl.arange(0, WAYS), block * CHUNK + tl.arange(0, CHUNK)
    real = (n[:, None] < images) & (f[None, :] < width)
    known = (w[:, None] < ways) & (f[None, :] < width)
    at = (job * images + n[:, None]) * width + f[None, :]
    x = tl.load(features + at, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(
        weights + job * parameters_per_job + w[:, None] * width + f[None, :], mask=known, other=0.0
    ).to(tl.float32)  # fmt: skip
    gradient = tl.load(logit_gradient + (job * IMAGES + n[:, None]) * WAYS + w[None, :])
    to_features = tl.dot(gradient, weight, input_precision=PRECISION)
    tl.store(feature_gradient + at, _stored(to_features, feature_gradient), mask=real)
    to_weights = tl.dot(tl.trans(gradient), x, input_precision=PRECISION)
    tl.store(weight_gradient + job * accumulators_per_job + w[:, None] * width + f[None, :], to_weights, mask=known)


@triton.jit
def masked_update(
    parameters, rates, gradients, accumulators_per_job, gradient_scale, sums, rounded, size, SIZE: tl.constexpr
):  # fmt: skip
    """phi <- phi - rate * gradient (Eq. 4), the sum of gradients, and a copy of phi in the passes' precision."""
    i, job = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.program_id(1).to(tl.int64)
    inside = i < size
    at = job * size + i
    gradient = tl.load(gradients + job * accumulators_per_job + i, mask=inside) / gradient_scale
    value = tl.load(parameters + at, mask=inside) - tl.load(rates + at, mask=inside) * gradient
    tl.store(parameters + at, value, mask=inside)
    tl.store(sums + at, tl.load(sums + at, mask=inside) + gradient, mask=inside)
    tl.store(rounded + at, _stored(value, rounded), mask=inside)
