"""The models of tasks, by their public names: where each is."""

from __future__ import annotations

MODELS = {
    "ORTModelForAudioClassification": "ortrain.deploy.models.tasks",
    "ORTModelForCTC": "ortrain.deploy.models.tasks",
    "ORTModelForCausalLM": "ortrain.deploy.models.causal",
    "ORTModelForFeatureExtraction": "ortrain.deploy.models.tasks",
    "ORTModelForImageClassification": "ortrain.deploy.models.tasks",
    "ORTModelForMaskedLM": "ortrain.deploy.models.tasks",
    "ORTModelForMultipleChoice": "ortrain.deploy.models.tasks",
    "ORTModelForQuestionAnswering": "ortrain.deploy.models.tasks",
    "ORTModelForSeq2SeqLM": "ortrain.deploy.models.seq2seq",
    "ORTModelForSequenceClassification": "ortrain.deploy.models.tasks",
    "ORTModelForSpeechSeq2Seq": "ortrain.deploy.models.seq2seq",
    "ORTModelForTokenClassification": "ortrain.deploy.models.tasks",
}
