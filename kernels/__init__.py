"""The operations of a forward pass and of the sampler. Imports torch and triton only, no code of the services.
`reference` and `sampling.eager` are eager torch for every device, and the oracle of the tests."""
