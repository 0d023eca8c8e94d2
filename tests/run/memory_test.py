"""A failed allocation is one sentence that names the stage and the setting to lower."""

import jax
from absl.testing import parameterized

from raslik_jax.run import memory


class MemoryTest(parameterized.TestCase):
    @parameterized.parameters(
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes.\n" + "x" * 5000
        ),
        MemoryError("Unable to allocate 9 GiB"),
    )
    def test_an_allocation_that_failed_names_what_to_lower(self, error):
        @memory.explained("fine-tuning", "--finetune.micro_batch_size")
        def stage():
            raise error

        for _ in range(2):  # a decorated function can be called again
            with self.assertRaisesRegex(
                ValueError, "^fine-tuning ran out of memory .*: lower --finetune.micro_batch_size$"
            ) as caught:
                stage()
            self.assertLess(len(str(caught.exception)), 300)

    def test_other_errors_of_the_device_stay_as_they_are(self):
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "INTERNAL"):
            with memory.explained("decoding", "--references.decode_batch_size"):
                raise jax.errors.JaxRuntimeError("INTERNAL: something broke")

    @parameterized.parameters(
        (96, 576, 10), (1024, 576, 1), (4096, 576, 1), (96, 128, 0), (0, 576, 0)
    )
    def test_a_cpu_holds_1024_tokens_of_a_wide_model(self, tokens, width, rows):
        self.assertEqual(memory.rows_held(tokens, width), rows)
