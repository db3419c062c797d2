# SPDX-License-Identifier: Apache-2.0
"""Train many adapters of one frozen base model as one training, with the results of separate runs.

`adapters` makes an `AdapterArray` from configurations or models of PEFT. Its optimizers, schedules and gradient scaler
are those of `thinwire.arrays.fusion`.
"""

from thinwire.arrays.finetuning.array import AdapterArray, adapters
from thinwire.arrays.finetuning.capacity import Capacity, measure_capacity

__all__ = ["AdapterArray", "Capacity", "adapters", "measure_capacity"]
