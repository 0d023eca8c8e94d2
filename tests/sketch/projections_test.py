"""The sketch against its theory, against explicit matrices, and against itself."""

import functools
import itertools
from typing import NamedTuple

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import theory
from absl.testing import parameterized
from snapshots import refused

from raslik_jax.sketch import families, hashing, kernels, projections
from raslik_jax.sketch.families import PROJECTIONS, binned_table

FAMILIES = tuple(PROJECTIONS)
MASK = (1 << 32) - 1


# The hash a second time, in plain Python integers: the slow and obvious version.
def python_mix(word: int) -> int:
    word ^= word >> 16
    word = word * 0x7FEB352D & MASK
    word ^= word >> 15
    word = word * 0x846CA68B & MASK
    return word ^ word >> 16


def python_mix_64(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    word = (word ^ word >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return word ^ word >> 31


def python_keys(seed: int, stream: int) -> tuple[int, int]:
    key = python_mix_64(python_mix_64(seed) ^ stream * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    return key & MASK, key >> 32


def python_hash(counter: int, seed: int, stream: int) -> int:
    key0, key1 = python_keys(seed, stream)
    return python_mix(python_mix(counter ^ key0) + key1 & MASK)


def python_order(count: int, seed: int) -> list[int]:
    key0, key1 = python_keys(seed, hashing.ORDER_STREAM)
    key = key0 << 32 | key1

    def position(counter: int) -> tuple[int, int]:
        hashed = python_mix_64(python_mix_64(counter ^ key) + key & (1 << 64) - 1)
        return hashed, counter

    return sorted(range(count), key=position)


def explicit_matrix(family: str, num_params: int, size: int, seed: int) -> np.ndarray:
    """Returns float64 [P, K], so that the sketch of a gradient is gradient @ matrix."""
    matrix_PK = np.zeros((num_params, size))
    if family == "dense_rademacher":
        for p, k in itertools.product(range(num_params), range(size)):
            row = python_hash(p // 2048 * 64 + p % 64, seed, hashing.ROW_STREAM)
            column = python_hash(k, seed, hashing.COLUMN_STREAM)
            bit = python_mix(row ^ column) >> p % 2048 // 64 & 1
            matrix_PK[p, k] = (-1) ** bit / size**0.5
        return matrix_PK
    order = python_order(num_params, seed)
    bins = sorted(order[j::size] for j in range(size))
    # Bins are numbered by their smallest member.
    bins.sort(key=min)
    bin_of = {p: j for j, members in enumerate(bins) for p in members}
    for p in range(num_params):
        sign_bit = python_hash(p, seed, hashing.SIGN_STREAM) >> 31
        matrix_PK[p, bin_of[p]] = (-1) ** sign_bit
    return matrix_PK


def random_gradients(batch: int, num_params: int, *, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, num_params)).astype(np.float32)


@functools.partial(jax.jit)
def project_rows(projection: projections.Projection, gradients_BP: jax.Array) -> jax.Array:
    return jax.vmap(lambda gradient_P: projections.project(projection, gradient_P))(gradients_BP)


class FamilyBatteryTest(parameterized.TestCase):
    """What every family has to do."""

    @parameterized.product(family=FAMILIES, shape=((2500, 20), (300, 300), (4100, 64), (7, 1)))
    def test_equals_the_explicit_matrix(self, family, shape):
        num_params, size = shape
        projection = projections.init_projection(11, family, num_params, size)
        gradients_BP = random_gradients(5, num_params, seed=0)
        wanted_BK = gradients_BP.astype(np.float64) @ explicit_matrix(family, *shape, 11)
        got_BK = project_rows(projection, gradients_BP)
        scale = np.abs(wanted_BK).max()
        np.testing.assert_allclose(got_BK, wanted_BK, rtol=0, atol=2e-6 * scale)

    @parameterized.product(family=FAMILIES, batch=(1, 4), dtype=("float32", "bfloat16"))
    def test_negated_gradient_gives_negated_sketch_bit_for_bit(self, family, batch, dtype):
        projection = projections.init_projection(2, family, 5000, 300)
        gradients_BP = jnp.asarray(random_gradients(batch, 5000, seed=3), dtype)
        np.testing.assert_array_equal(
            project_rows(projection, -gradients_BP), -project_rows(projection, gradients_BP)
        )

    @parameterized.product(family=FAMILIES)
    def test_vmap_loop_nested_vmap_and_no_jit_agree(self, family):
        projection = projections.init_projection(3, family, 3000, 256)
        gradients_BP = jnp.asarray(random_gradients(6, 3000, seed=4))
        batched_BK = project_rows(projection, gradients_BP)
        loop_BK = jnp.stack([projections.project(projection, g) for g in gradients_BP])
        nested = jax.vmap(jax.vmap(functools.partial(projections.project, projection)))
        np.testing.assert_allclose(loop_BK, batched_BK, rtol=0, atol=1e-4)
        np.testing.assert_allclose(
            nested(gradients_BP.reshape(2, 3, 3000)).reshape(6, 256), batched_BK, rtol=0, atol=1e-4
        )

    @parameterized.product(family=FAMILIES)
    def test_same_seed_same_sketch_other_seed_another(self, family):
        gradients_BP = random_gradients(1, 2000, seed=5)
        once, again, other = (
            project_rows(projections.init_projection(seed, family, 2000, 100), gradients_BP)
            for seed in (4, 4, 5)
        )
        np.testing.assert_array_equal(once, again)
        self.assertGreater(float(jnp.abs(once - other).max()), 0.1)

    @parameterized.product(family=FAMILIES)
    def test_it_is_a_pytree_and_refuses_other_lengths(self, family):
        projection = projections.init_projection(6, family, 100, 10)
        np.testing.assert_array_equal(projections.project(projection, jnp.zeros(100)), np.zeros(10))
        self.assertEqual(jax.jit(lambda p: p)(projection).spec, projection.spec)
        self.assertLen(jax.tree.leaves(projection), 1 if family == "binned" else 0)
        with self.assertRaisesRegex(ValueError, "100 coordinates, got 99"):
            projections.project(projection, jnp.zeros(99))
        with self.assertRaisesRegex(ValueError, "size=101 with num_params=100"):
            projections.init_projection(0, family, 100, 101)

    # First coordinates of the sketch of 1, 2, ..., 1000 under seed 7 at K = 64. A change of one
    # of these numbers makes every index ever written unreadable: raise SKETCH_FORMAT with it.
    @parameterized.parameters(
        ("binned", [-296.0, 3074.0, -3795.0, 4824.0, 134.0, -289.0]),
        ("dense_rademacher", [-2335.0, 4033.5, 1825.5, -1662.25, -2191.75, 947.75]),
    )
    def test_golden_values(self, family, wanted):
        projection = projections.init_projection(7, family, 1000, 64)
        sketch_K = projections.project(projection, jnp.arange(1, 1001, dtype=jnp.float32))
        np.testing.assert_array_equal(sketch_K[:6], np.array(wanted, np.float32))
        self.assertEqual(projections.SKETCH_FORMAT, 1)


class HashTest(parameterized.TestCase):
    def test_golden_words(self):
        counter = np.arange(4, dtype=np.uint32)
        keys = hashing.stream_keys(1234567890123, hashing.SIGN_STREAM)
        wanted = [2913345578, 633716242, 2820454385, 32559723]
        self.assertEqual([int(word) for word in hashing.counter_hash(counter, keys)], wanted)
        self.assertEqual(
            [int(word) for word in hashing.counter_hash(jnp.asarray(counter), keys)], wanted
        )
        self.assertEqual(
            [python_hash(c, 1234567890123, hashing.SIGN_STREAM) for c in range(4)], wanted
        )

    def test_order_is_a_permutation_and_the_sort_of_the_python_hash(self):
        self.assertEqual(hashing.hashed_order(500, 9).tolist(), python_order(500, 9))
        self.assertEqual(sorted(hashing.hashed_order(4099, 3).tolist()), list(range(4099)))
        self.assertEqual(hashing.hashed_order(8, 0).tolist(), [7, 4, 6, 3, 1, 2, 5, 0])

    def test_dense_signs_are_independent_over_4096_rows_and_columns(self):
        signs = functools.partial(
            kernels.block_signs,
            column_C=jnp.arange(4096, dtype=jnp.uint32),
            keys=tuple(
                hashing.stream_keys(5, stream)
                for stream in (hashing.ROW_STREAM, hashing.COLUMN_STREAM)
            ),
            dtype=jnp.float32,
        )
        sign_PK = np.concatenate([np.asarray(signs(jnp.int32(block))) for block in (0, 1)])
        self.assertEqual(sign_PK.shape, (4096, 4096))
        for name, matrix in (("rows", sign_PK), ("columns", sign_PK.T)):
            correlation = matrix @ matrix.T / 64.0
            np.fill_diagonal(correlation, 0.0)
            self.assertLess(np.abs(correlation).max(), 6.0, name)
            self.assertLess(np.abs(matrix.sum(axis=1)).max() / 64.0, 5.0, name)

    def test_signs_of_coordinates_are_balanced_and_uncorrelated_at_every_lag(self):
        count = 1 << 20
        counter = np.arange(count, dtype=np.uint32)
        keys = hashing.stream_keys(0, hashing.SIGN_STREAM)
        sign = 1.0 - 2.0 * (hashing.counter_hash(counter, keys) >> np.uint32(31)).astype(np.float64)
        spectrum = np.fft.rfft(sign, 2 * count)
        autocorrelation = np.fft.irfft(np.abs(spectrum) ** 2)[: count // 2]
        pairs = count - np.arange(count // 2)
        self.assertLess(np.abs(autocorrelation[1:] / np.sqrt(pairs[1:])).max(), 6.0)
        self.assertLess(abs(sign.sum()) / np.sqrt(count), 5.0)


def _spec(num_params: int, size: int, seed: int) -> families.ProjectionSpec:
    return families.ProjectionSpec(family="binned", num_params=num_params, size=size, seed=seed)


def table_indices(spec: families.ProjectionSpec) -> np.ndarray:
    """Returns the coordinates of a binned table, without their signs."""
    table_MK = binned_table(spec)
    return table_MK ^ (table_MK >> 31)


class BinsTest(parameterized.TestCase):
    def test_bins_draw_from_the_whole_vector(self):
        index_MK = table_indices(_spec(1 << 23, 1 << 16, 0))
        block_MK = np.sort(index_MK >> 12, axis=0)
        distinct_K = 1 + np.count_nonzero(np.diff(block_MK, axis=0), axis=0)
        # 128 members in 2,048 blocks of 4,096 coordinates.
        expected = 2048 * (1 - (1 - 1 / 2048) ** 128)
        self.assertAlmostEqual(expected, 124.1, delta=0.1)
        self.assertAlmostEqual(float(distinct_K.mean()), expected, delta=0.05)
        self.assertGreaterEqual(int(distinct_K.min()), 110)

    @parameterized.parameters((1000, 64), (1000, 999), (1000, 1000), (1000, 1), (65, 64))
    def test_every_coordinate_once_and_no_bin_empty(self, num_params, size):
        index_MK = table_indices(_spec(num_params, size, 1))
        self.assertEqual(
            np.sort(index_MK, axis=None)[:num_params].tolist(), list(range(num_params))
        )
        count_K = np.count_nonzero(index_MK < num_params, axis=0)
        self.assertLessEqual(count_K.max() - count_K.min(), 1)
        self.assertGreaterEqual(count_K.min(), 1)

    def test_reads_are_in_order(self):
        index_MK = table_indices(_spec(1 << 16, 1 << 12, 1))
        self.assertTrue(np.all(np.diff(index_MK[0]) > 0))
        self.assertTrue(np.all(np.diff(index_MK, axis=0) > 0))

    def test_two_coordinates_meet_as_often_as_predicted(self):
        # K does not divide P: 30 bins of 3 and 20 of 2.
        num_params, size, draws = 130, 50, 400
        meetings = 0
        for seed in range(draws):
            bin_P = PROJECTIONS["binned"].bins(_spec(num_params, size, seed))
            count_K = np.bincount(bin_P, minlength=size)
            meetings += int((count_K * (count_K - 1)).sum())
        p = PROJECTIONS["binned"].collision(num_params, size)
        self.assertEqual(meetings, draws * (30 * 6 + 20 * 2))
        self.assertAlmostEqual(meetings / draws / (num_params * (num_params - 1)), p, places=12)
        same = sum(
            np.ptp(PROJECTIONS["binned"].bins(_spec(130, 50, n))[[17, 18]]) == 0
            for n in range(4000)
        )
        self.assertLess(abs(same - 4000 * p), 5 * np.sqrt(4000 * p * (1 - p)))

    def test_the_formula_is_the_published_one_where_size_divides(self):
        self.assertAlmostEqual(
            PROJECTIONS["binned"].collision(1 << 14, 1 << 10),
            (2**14 - 2**10) / (2**14 - 1) / 2**10,
            places=15,
        )
        self.assertEqual(PROJECTIONS["binned"].collision(64, 64), 0.0)
        self.assertEqual(PROJECTIONS["dense_rademacher"].collision(640, 64), 1 / 64)


# ------------------------------------------------------------------ the Monte-Carlo tests


class Vectors(NamedTuple):
    """Unit vectors: pairs (u, v) one after the other, then one common vector."""

    unit_BP: np.ndarray
    names: tuple[str, ...]
    rho: tuple[float, ...]


def make_vectors(num_params: int) -> Vectors:
    """Returns Gaussian and heavy-tailed pairs (scales from a t of 2.5 degrees), rho 0, .5, .9."""
    rng = np.random.default_rng(0)
    rows, names, rhos = [], [], []
    for kind, rho in itertools.product(("gaussian", "heavy"), (0.0, 0.5, 0.9)):
        scale = np.abs(rng.standard_t(2.5, num_params)) if kind == "heavy" else 1.0
        u, w = scale * rng.standard_normal((2, num_params))
        u /= np.linalg.norm(u)
        w -= (w @ u) * u
        w /= np.linalg.norm(w)
        rows += [u, rho * u + np.sqrt(1 - rho**2) * w]
        names.append(f"{kind} {rho}")
        rhos.append(rho)
    common = rng.standard_normal(num_params)
    rows.append(0.5 * common / np.linalg.norm(common))
    return Vectors(np.array(rows), tuple(names), tuple(rhos))


def sketch_grams(family: str, vectors_BP: np.ndarray, size: int, draws: int) -> np.ndarray:
    """Returns float64 [draws, B, B]: inner products of the sketches under each seed."""
    gradients_BP = jnp.asarray(vectors_BP, jnp.float32)
    num_params = vectors_BP.shape[1]
    optimized = functools.partial(jax.jit, compiler_options=compiling.OPTIMIZED)

    def gram(sketch_BK: jax.Array) -> jax.Array:
        return jnp.matmul(sketch_BK, sketch_BK.T)

    if family == "binned":
        one = optimized(lambda table_MK: gram(kernels.binned_sums(table_MK, gradients_BP)))
        tables = (binned_table(_spec(num_params, size, seed)) for seed in range(draws))
        return np.array([one(table_MK) for table_MK in tables], np.float64)
    streams = hashing.ROW_STREAM, hashing.COLUMN_STREAM
    keys = np.array(
        [[hashing.stream_keys(seed, stream) for stream in streams] for seed in range(draws)]
    )

    def one_draw(key_22: jax.Array) -> jax.Array:
        keys = tuple((key_22[i, 0], key_22[i, 1]) for i in range(2))
        sums_BK = kernels.dense_sums_xla(gradients_BP, size=size, keys=keys, operand="float32")
        return gram(sums_BK) / size

    return np.asarray(optimized(lambda keys: jax.lax.map(one_draw, keys))(keys), np.float64)


def cosines(grams: np.ndarray, i: int, j: int) -> np.ndarray:
    return grams[:, i, j] / np.sqrt(grams[:, i, i] * grams[:, j, j])


def variance_and_error(samples: np.ndarray) -> tuple[float, float]:
    """Returns the variance of samples and its standard error, by their measured kurtosis."""
    deviation = samples - samples.mean()
    variance = np.mean(deviation**2)
    return variance, np.sqrt((np.mean(deviation**4) - variance**2) / samples.size)


@functools.cache
def measured(family: str, num_params: int, size: int, draws: int) -> tuple[Vectors, np.ndarray]:
    vectors = make_vectors(num_params)
    return vectors, sketch_grams(family, vectors.unit_BP, size, draws)


# Small enough for every run, and the size of the theory's own recipe. The dense family makes P K
# signs a draw: it has a quarter of P and of the draws.
SMALL = {"num_params": 2048, "size": 128, "draws": 3000}
LARGE = {"num_params": 16384, "size": 1024, "draws": 6000}
LARGE_DENSE = {"num_params": 4096, "size": 1024, "draws": 1500}
CASES = tuple(
    pytest.param(family, sizes, id=f"{name}-{family}", marks=marks)
    for family in FAMILIES
    for name, sizes, marks in (
        ("small", SMALL, ()),
        ("large", LARGE_DENSE if family == "dense_rademacher" else LARGE, pytest.mark.heavy),
    )
)


@pytest.mark.parametrize(("family", "sizes"), CASES)
class TestMonteCarlo:
    def test_variance_of_inner_products_is_the_formula(self, family, sizes):
        vectors, grams = measured(family, **sizes)
        p = PROJECTIONS[family].collision(sizes["num_params"], sizes["size"])
        for pair, name in enumerate(vectors.names):
            variance, error = variance_and_error(grams[:, 2 * pair, 2 * pair + 1])
            wanted = theory.unnormalized_variance(*vectors.unit_BP[2 * pair : 2 * pair + 2], p)
            assert abs(variance - wanted) < 5 * error, (name, variance / wanted, error / wanted)

    def test_inner_products_are_unbiased(self, family, sizes):
        for size in (sizes["size"], 4 * sizes["size"]):
            draws = sizes["draws"] if size == sizes["size"] else 400
            if sizes is LARGE_DENSE and size > sizes["size"]:
                draws = 100
            vectors, grams = measured(family, sizes["num_params"], size, draws)
            for pair, rho in enumerate(vectors.rho):
                for i, j, wanted in ((0, 1, rho), (0, 0, 1.0)):
                    samples = grams[:, 2 * pair + i, 2 * pair + j]
                    error = samples.std() / np.sqrt(samples.size)
                    assert abs(samples.mean() - wanted) < 5 * error, (vectors.names[pair], size)

    def test_variance_of_cosines_is_the_formula(self, family, sizes):
        vectors, grams = measured(family, **sizes)
        p = PROJECTIONS[family].collision(sizes["num_params"], sizes["size"])
        for pair, (name, rho) in enumerate(zip(vectors.names, vectors.rho, strict=True)):
            variance, error = variance_and_error(cosines(grams, 2 * pair, 2 * pair + 1))
            wanted = theory.cosine_variance(*vectors.unit_BP[2 * pair : 2 * pair + 2], p)
            wanted *= 1 + 11 * rho**2 / (2 * sizes["size"])
            assert abs(variance - wanted) < 5 * error, (name, variance / wanted, error / wanted)

    def test_variance_of_centered_cosines_is_the_formula(self, family, sizes):
        """Centering is linear: it may be done on sketches, and the theory is that of u - mu."""
        vectors, grams = measured(family, **sizes)
        p = PROJECTIONS[family].collision(sizes["num_params"], sizes["size"])
        centered_BP = vectors.unit_BP[:-1] - vectors.unit_BP[-1]
        centered_BP /= np.linalg.norm(centered_BP, axis=1, keepdims=True)
        # <x - mu, y - mu> of sketches, from inner products of sketches alone.
        with_mean = grams[:, :, -1]
        centered = grams - with_mean[:, :, None] - with_mean[:, None, :] + grams[:, -1:, -1:]
        for pair, name in enumerate(vectors.names):
            u, v = centered_BP[2 * pair : 2 * pair + 2]
            samples = cosines(centered, 2 * pair, 2 * pair + 1)
            variance, error = variance_and_error(samples)
            wanted = theory.cosine_variance(u, v, p)
            wanted *= 1 + 11 * (u @ v) ** 2 / (2 * sizes["size"])
            assert abs(variance - wanted) < 5 * error, (name, variance / wanted, error / wanted)
            bias = samples.mean() - u @ v - theory.cosine_bias(u @ v, p)
            assert abs(bias) < 5 * np.sqrt(variance / samples.size) + p**2, name

    def test_variance_of_the_mean_over_queries_is_the_formula(self, family, sizes):
        vectors, grams = measured(family, **sizes)
        p = PROJECTIONS[family].collision(sizes["num_params"], sizes["size"])
        # The Gaussian pairs are correlated within and not between: as queries of row 1.
        row, queries = 1, (0, 2, 3, 4, 5)
        unit_BP = vectors.unit_BP
        gram_QQ = unit_BP[list(queries)] @ unit_BP[list(queries)].T
        rho_Q = unit_BP[list(queries)] @ unit_BP[row]
        samples = np.mean([cosines(grams, row, query) for query in queries], axis=0)
        variance, error = variance_and_error(samples)
        wanted = theory.mean_score_variance(gram_QQ, rho_Q, p)
        # The neglected diagonal terms are of the order of 1 / P for Gaussian vectors.
        slack = 20 * wanted / sizes["num_params"] + 11 * wanted / (2 * sizes["size"])
        assert abs(variance - wanted) < 5 * error + slack, (variance / wanted, error / wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_bias_of_cosines_at_a_small_size_is_the_formula(family):
    num_params, size, draws = 256, 16, 12_000
    vectors, grams = measured(family, num_params, size, draws)
    p = PROJECTIONS[family].collision(num_params, size)
    for pair in range(3):
        rho = vectors.rho[pair]
        samples = cosines(grams, 2 * pair, 2 * pair + 1)
        error = samples.std() / np.sqrt(draws)
        wanted = theory.cosine_bias(rho, p)
        # The next order of the bias, of the size of p^2.
        assert abs(samples.mean() - rho - wanted) < 5 * error + 0.5 * p**2, (rho, samples.mean())
        if rho == 0.5:
            assert wanted < -5 * error, "the draws are too few to see the bias at all"


class FlattenTest(parameterized.TestCase):
    TREE = {
        "b": {"lora_b": np.arange(6.0, dtype=np.float32).reshape(3, 2)},
        "a": {"x": np.float32([7.0]), "lora_a": np.float32([[8.0, 9.0]])},
    }

    def test_manifest_names_every_tensor_in_order_of_its_path(self):
        self.assertEqual(
            projections.gradient_manifest(self.TREE),
            (("a/lora_a", (1, 2), 0), ("a/x", (1,), 2), ("b/lora_b", (3, 2), 3)),
        )
        abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, self.TREE))
        self.assertEqual(
            projections.gradient_manifest(abstract), projections.gradient_manifest(self.TREE)
        )
        self.assertEqual(projections.count_params(abstract), 9)

    def test_flat_gradient_follows_the_manifest(self):
        flat_P = projections.flatten_gradients(jax.tree.map(jnp.asarray, self.TREE))
        self.assertEqual(flat_P.tolist(), [8.0, 9.0, 7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])

    def test_flat_gradient_is_float32(self):
        flat_P = projections.flatten_gradients({"a": jnp.ones(3, jnp.bfloat16)})
        self.assertEqual(flat_P.dtype, jnp.float32)

    def test_refuses_a_tree_without_leaves(self):
        with self.assertRaisesRegex(ValueError, "LoRA parameters"):
            projections.flatten_gradients({"a": {}})


class SpecTest(parameterized.TestCase):
    @parameterized.parameters(
        *({"num_params": number} for number in (0, 1 << 31)),
        *({"seed": seed} for seed in (-1, 1 << 63)),
        {"size": 0},
        {"family": "gaussian"},
        {"family": "dense_rademacher", "operand": "float16"},
        {"operand": "bfloat16"},
    )
    def test_refuses_what_it_cannot_do(self, **change):
        settings = {"family": "binned", "num_params": 100, "size": 10, "seed": 0, **change}
        with refused():
            families.ProjectionSpec(**settings)
