"""The worker: step plans in, sampled tokens out. Owns weights, KV caches and the device."""
