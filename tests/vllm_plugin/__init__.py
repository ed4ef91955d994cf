"""Tests of corrections in vLLM. They run in its own virtual environment (`tests.support.vllm_environment`)."""
