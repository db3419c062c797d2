# SPDX-License-Identifier: Apache-2.0
"""Many models as one array, and sweeps over hyperparameters that use it."""
