"""Test kit shipped to authors of backends, policies and connectors: ``kvtier[testing]``."""

import pytest

pytest.register_assert_rewrite(
    "kvtier.testing.backend_suite",
    "kvtier.testing.connector_suite",
    "kvtier.testing.policy_suite",
    "kvtier.testing.transfer_scene",
    "kvtier.testing.transfer_suite",
)
