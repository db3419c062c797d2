# SPDX-License-Identifier: Apache-2.0
"""Membership: numbered views of the workers, agreed on in a store that outlives every worker."""
