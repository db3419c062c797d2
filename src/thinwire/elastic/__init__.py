# SPDX-License-Identifier: Apache-2.0
"""Who trains together: numbered views of the workers, agreed on in one store that outlives every worker."""
