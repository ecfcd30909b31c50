"""What the model of step times learns, against made-up machines whose rule is known."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stallfree_worker.engine.step_time import StepShape, StepTimeModel

Machine = Callable[[StepShape], float]


def prefill(num_tokens: int, context_tokens: int = 0) -> StepShape:
    return StepShape().with_chunk(num_tokens, context_tokens, is_last=False)


def decodes(count: int, context_tokens: int = 500) -> StepShape:
    return StepShape().with_decodes([context_tokens] * count)


def small_machine(shape: StepShape) -> float:
    """Weights are read anyway, then arithmetic decides; attention grows along the prompt."""
    linear = 0.03 + 0.0002 * shape.num_tokens + 0.0008 * max(0, shape.num_tokens - 40)
    return linear + 0.001 * shape.num_rows + 1e-6 * shape.decode_context_tokens + 4e-8 * shape.prefill_attention_tokens


def random_steps(rng: random.Random, count: int) -> Iterator[StepShape]:
    """Mostly decodes, as when serving; one step in seven carries a chunk."""
    for _ in range(count):
        shape = decodes(rng.choice([1, 2, 4, 8, 8, 16, 32]), rng.randint(50, 4000))
        if rng.random() < 0.15:
            shape = shape.with_chunk(rng.choice([16, 48, 120, 250, 500]), rng.randint(0, 8000), is_last=False)
        yield shape


def learned(machine: Machine, count: int = 1500, *, seed: int = 1, noise: float = 0.05) -> StepTimeModel:
    rng = random.Random(seed)
    model = StepTimeModel()
    for shape in random_steps(rng, count):
        model.observe(shape, machine(shape) * rng.lognormvariate(0, noise))
    return model


def errors(model: StepTimeModel, machine: Machine, *, seed: int = 2, count: int = 300) -> list[float]:
    return sorted(abs(model.predict(shape) / machine(shape) - 1) for shape in random_steps(random.Random(seed), count))


def test_there_is_a_positive_prediction_before_any_step() -> None:
    model = StepTimeModel()
    assert 0 < model.predict(prefill(1)) < model.predict(prefill(512)) < 1
    assert model.error_ratio == 0
    assert model.summary.seconds_per_token > 0


def test_the_first_step_sets_the_level() -> None:
    model = StepTimeModel()
    model.observe(prefill(64), 2.0)
    assert model.predict(prefill(64)) == pytest.approx(2.0, rel=0.05)


def test_the_median_error_is_within_10_percent_and_nearly_all_within_30() -> None:
    found = errors(learned(small_machine), small_machine)
    assert statistics.median(found) < 0.10
    assert found[int(0.95 * len(found))] < 0.30


def test_chunks_are_predicted_though_nearly_all_steps_are_decodes() -> None:
    model = learned(small_machine)
    for chunk, context in ((120, 0), (250, 4000), (500, 8000)):
        shape = decodes(8).with_chunk(chunk, context, is_last=False)
        assert model.predict(shape) == pytest.approx(small_machine(shape), rel=0.15)


def test_a_quantile_covers_its_share_of_the_steps() -> None:
    rng, model = random.Random(3), learned(small_machine)
    shapes = list(random_steps(rng, 500))
    covered = sum(
        small_machine(shape) * rng.lognormvariate(0, 0.05) <= model.predict(shape, quantile=0.95) for shape in shapes
    )
    assert 0.90 <= covered / len(shapes) <= 1.0


@pytest.mark.parametrize(("num_decodes", "num_prefills"), [(50, 3), (201, 4)])
def test_a_size_that_was_never_seen_is_learned_from_its_first_steps(num_decodes: int, num_prefills: int) -> None:
    """While every step is followed by a fit, and later."""
    model = StepTimeModel()
    for _ in range(num_decodes):
        model.observe(decodes(1), small_machine(decodes(1)))
    for _ in range(num_prefills):
        model.observe(prefill(500), 40 * small_machine(prefill(500)))
    assert model.predict(prefill(500)) == pytest.approx(40 * small_machine(prefill(500)), rel=0.2)
    assert model.predict(decodes(1)) == pytest.approx(small_machine(decodes(1)), rel=0.2)


def test_what_logits_take_beyond_the_likeliest_tokens_is_learned_apart() -> None:
    """Steps of either kind are predicted as well as if there were no other."""

    def machine(shape: StepShape) -> float:
        return small_machine(shape) + (0.005 + 0.0003 * shape.num_rows if shape.needs_logits else 0.0)

    rng, model = random.Random(6), StepTimeModel()
    for shape in random_steps(rng, 1500):
        shape = shape._replace(needs_logits=rng.random() < 0.3)
        model.observe(shape, machine(shape) * rng.lognormvariate(0, 0.02))
    for needs_logits in (False, True):
        shapes = [shape._replace(needs_logits=needs_logits) for shape in random_steps(random.Random(7), 300)]
        assert statistics.median([abs(model.predict(shape) / machine(shape) - 1) for shape in shapes]) < 0.02


@pytest.mark.parametrize(
    "add", [lambda shape: shape.with_decodes([9], needs_logits=True), lambda shape: shape.with_rows(1)]
)
def test_one_row_that_needs_logits_makes_the_step_need_them(add: Callable[[StepShape], StepShape]) -> None:
    assert not decodes(3).needs_logits
    assert add(decodes(3)).with_decodes([9]).with_chunk(5, 0, is_last=True).needs_logits
    assert decodes(3).with_chunk(5, 0, is_last=True, needs_logits=True).needs_logits
    assert not decodes(3).with_chunk(5, 0, is_last=False, needs_logits=True).needs_logits


def test_an_outlier_hardly_moves_the_prediction() -> None:
    model, same = learned(small_machine), learned(small_machine)
    model.observe(decodes(8), 30.0)
    for _ in range(10):
        model.observe(decodes(8), small_machine(decodes(8)))
        same.observe(decodes(8), small_machine(decodes(8)))
    for shape in (decodes(8), decodes(8).with_chunk(250, 1000, is_last=False)):
        assert model.predict(shape) == pytest.approx(same.predict(shape), rel=0.1)


def test_a_lasting_change_of_what_a_decode_costs_is_learned_from_decodes_alone() -> None:
    """Few and many decodes change unequally, so a speed alone cannot follow; and their classes are full by then."""
    rng = random.Random(4)
    counts = (1, 2, 4, 8, 16, 32)
    model = StepTimeModel()
    for _ in range(600):
        shape = decodes(rng.choice(counts))
        model.observe(shape, small_machine(shape) * rng.lognormvariate(0, 0.05))

    def changed(shape: StepShape) -> float:
        return small_machine(shape) + 0.004 * shape.num_rows

    for _ in range(1200):
        shape = decodes(rng.choice(counts))
        model.observe(shape, changed(shape) * rng.lognormvariate(0, 0.05))
    for count in counts:
        assert model.predict(decodes(count)) == pytest.approx(changed(decodes(count)), rel=0.1)


def test_a_lasting_change_of_speed_is_believed_within_20_steps() -> None:
    model = learned(small_machine)
    for shape in random_steps(random.Random(4), 20):
        model.observe(shape, 2.5 * small_machine(shape))
    found = [
        abs(model.predict(shape) / (2.5 * small_machine(shape)) - 1) for shape in random_steps(random.Random(5), 100)
    ]
    assert statistics.median(found) < 0.15


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 600), st.floats(1e-4, 10.0)), max_size=40),
    st.integers(0, 64),
    st.integers(0, 2000),
    st.integers(0, 10_000),
)
@example([(1, 257, 1.0), (1, 258, 2.0), (1, 0, 1.0)], 0, 0, 0)
def test_more_work_never_takes_less_time(
    steps: list[tuple[int, int, float]], num_decodes: int, chunk: int, context: int
) -> None:
    """Whatever was observed: a budget can be found by bisection."""
    model = StepTimeModel()
    for count, num_tokens, seconds in steps:
        model.observe(decodes(count).with_chunk(num_tokens, context, is_last=False), seconds)
    shape = decodes(num_decodes)
    times = [
        model.predict(shape.with_chunk(size, context, is_last=False)) for size in (chunk, chunk + 1, 2 * chunk + 16)
    ]
    assert 0 <= times[0] <= times[1] <= times[2]
    assert model.predict(shape) <= times[0] * (1 + 1e-9)
    assert model.predict(shape, quantile=0.95) >= model.predict(shape)


def test_routers_get_a_line_that_is_right_at_both_ends() -> None:
    model = learned(small_machine)
    line = model.summary
    for shape in (decodes(1, 0), StepShape().with_chunk(512, 0, is_last=True)):
        seconds = line.base_seconds + line.seconds_per_token * shape.num_tokens
        assert seconds == pytest.approx(model.predict(shape), rel=0.05)


def test_how_far_off_steps_are_is_learned_for_prefills_and_decodes_apart() -> None:
    rng = random.Random(5)
    model = StepTimeModel()
    mixed = decodes(8).with_chunk(250, 1000, is_last=False)
    for _ in range(100):
        model.observe(decodes(8), small_machine(decodes(8)) * rng.choice([0.9, 1.0, 1.5]))
        model.observe(mixed, small_machine(mixed) * rng.uniform(0.99, 1.01))
    ratio_of_decodes = model.predict(decodes(8), quantile=0.95) / model.predict(decodes(8))
    ratio_of_prefills = model.predict(mixed, quantile=0.95) / model.predict(mixed)
    assert ratio_of_decodes > 1.25
    assert ratio_of_prefills < 1.2


@pytest.mark.parametrize(("context", "chunk"), [(0, 100), (0, 1500), (300, 200), (400, 500), (5000, 64), (511, 2)])
def test_layers_with_a_window_count_what_they_see(context: int, chunk: int) -> None:
    shape = StepShape(windows=((None, 0.25), (512, 0.75))).with_chunk(chunk, context, is_last=False)
    positions = range(context, context + chunk)
    pairs = sum(0.25 * (position + 1) + 0.75 * min(position + 1, 512) for position in positions)
    assert shape.prefill_attention_tokens == pytest.approx(pairs, rel=0.01, abs=chunk)


def test_a_decode_reads_of_a_window_what_it_holds() -> None:
    windows = ((None, 0.25), (512, 0.75))
    assert StepShape(windows=windows).with_decodes([4096]).decode_context_tokens == pytest.approx(1024 + 384, abs=1)
    assert StepShape(windows=windows).with_decodes([100]).decode_context_tokens == pytest.approx(100, abs=1)
    together = StepShape(windows=windows).with_decodes([100, 511, 512, 4096])
    one_by_one = StepShape(windows=windows)
    for context in (100, 511, 512, 4096):
        one_by_one = one_by_one.with_decodes([context])
    assert together.decode_context_tokens == pytest.approx(one_by_one.decode_context_tokens)
    assert together._replace(decode_context_tokens=0.0) == one_by_one._replace(decode_context_tokens=0.0)
    assert together.num_requests == 4
