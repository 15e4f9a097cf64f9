"""Programs whose results differ on purpose, with the reason; the tests assert that they still do."""

from __future__ import annotations

KNOWN_DIFFERENCES: dict[str, str] = {
    "preparing: Accelerator().prepare()": "Accelerate fails with IndexError; no objects give an empty tuple here",
    "preparing.join_uneven_inputs_sets_even_batches": (
        "Accelerate joins ranks on GPUs only; CPU ranks are joined here, too"
    ),
    "preparing.reset_states_have_no_values": (
        "Accelerate refuses AcceleratorState() before an Accelerator; here it reads the environment"
    ),
    "protocols.forward_replaced_by_the_user": (
        "Accelerate calls a forward that is a plain function with the model as an additional argument and fails"
    ),
    "protocols.loader_set_attribute": (
        "Accelerate takes a new dataset, sampler or batch size of a prepared loader and ignores it; torch's error here"
    ),
    "protocols.optimizer_closure": "Accelerate drops the loss that the optimizer's step returns",
}
