"""Tests of corrections in vLLM. They run in its own virtual environment (`tests.support.vllm_environment`).

In a folder named `vllm`, pytest would take the tests for the package of that name.
"""
