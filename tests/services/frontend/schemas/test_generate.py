from services.frontend.schemas.generate import GenerateRequest, SamplingParams


def test_how_to_sample_stands_apart_from_the_request() -> None:
    assert not set(SamplingParams.model_fields) & set(GenerateRequest.model_fields)
    assert "temperature" in SamplingParams.model_fields
