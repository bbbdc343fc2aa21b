"""The data plane's URLs, which `inference.edge.handler` serves without Django's middleware."""

from django.urls import path, re_path

from inference.api.anthropic.batches import (
    MessageBatchCancelView,
    MessageBatchesView,
    MessageBatchResultsView,
    MessageBatchView,
)
from inference.api.anthropic.views import CountTokensView, MessagesView, UnknownMessagesView
from inference.api.audio.views import TranscriptionsView, TranslationsView
from inference.api.batches.views import BatchCancelView, BatchesView, BatchView
from inference.api.chat import (
    ChatBatchView,
    CompletionMessagesView,
    StoredCompletionsView,
    StoredCompletionView,
)
from inference.api.completions import CompletionsView
from inference.api.conversations import (
    ConversationItemsView,
    ConversationItemView,
    ConversationsView,
    ConversationView,
)
from inference.api.files import FileContentView, FilesView, FileView
from inference.api.health import HealthView, MetricsView, PingView, ReadyView, VersionView
from inference.api.models import ModelsView, ModelView, UnknownPathView
from inference.api.operator import (
    AbortRequestsView,
    CollectiveRpcView,
    IsPausedView,
    IsSleepingView,
    LoadView,
    PauseView,
    ResetEncoderCacheView,
    ResetMediaCacheView,
    ResetPrefixCacheView,
    ResumeView,
    ServerInfoView,
    SleepView,
    StartProfileView,
    StopProfileView,
    TokenizerInfoView,
    WakeUpView,
)
from inference.api.organization import CompletionsUsageView, CostsView, EmbeddingsUsageView
from inference.api.pooling.views import (
    ClassifyView,
    EmbeddingsView,
    ModerationsView,
    PoolingView,
    RerankV2View,
    RerankView,
    ScoreView,
)
from inference.api.responses.compact import CompactView
from inference.api.responses.views import (
    InputTokensView,
    ResponseCancelView,
    ResponseInputItemsView,
    ResponsesView,
    ResponseView,
)
from inference.api.scaling import IsScalingView, ScaleView, WorldSizeView
from inference.api.tokenization import (
    ChatRenderView,
    CompletionRenderView,
    DetokenizeView,
    MessagesRenderView,
    ResponseRenderView,
    TokenizeView,
)
from inference.api.tokens import TokensView
from inference.api.uploads import UploadCancelView, UploadCompleteView, UploadPartsView, UploadsView
from inference.api.vllm_compat import (
    GenerateView,
    InvocationsView,
    LoadAdapterView,
    UnloadAdapterView,
)
from inference.openapi import OpenApiView

urlpatterns = [
    path("v1/load_lora_adapter", LoadAdapterView.as_view()),
    path("v1/unload_lora_adapter", UnloadAdapterView.as_view()),
    # The same two endpoints under shorter paths.
    path("v1/lora/load", LoadAdapterView.as_view()),
    path("v1/lora/unload", UnloadAdapterView.as_view()),
    path("v1/models", ModelsView.as_view()),
    path("v1/models/<path:model>", ModelView.as_view()),
    path("v1/chat/completions", StoredCompletionsView.as_view()),
    path("v1/chat/completions/batch", ChatBatchView.as_view()),
    path("v1/chat/completions/render", ChatRenderView.as_view()),
    path("v1/chat/completions/<str:completion_id>", StoredCompletionView.as_view()),
    path("v1/chat/completions/<str:completion_id>/messages", CompletionMessagesView.as_view()),
    path("v1/completions", CompletionsView.as_view()),
    path("v1/completions/render", CompletionRenderView.as_view()),
    path("inference/v1/generate", TokensView.as_view()),
    # vLLM's older path of the same endpoint.
    path("v1/generate", TokensView.as_view()),
    path("generate", GenerateView.as_view()),
    path("invocations", InvocationsView.as_view()),
    path("v1/organization/usage/completions", CompletionsUsageView.as_view()),
    path("v1/organization/usage/embeddings", EmbeddingsUsageView.as_view()),
    path("v1/organization/costs", CostsView.as_view()),
    path("v1/audio/transcriptions", TranscriptionsView.as_view()),
    path("v1/audio/translations", TranslationsView.as_view()),
    path("v1/embeddings", EmbeddingsView.as_view()),
    path("v1/moderations", ModerationsView.as_view()),
    path("pooling", PoolingView.as_view()),
    path("classify", ClassifyView.as_view()),
    path("v1/classify", ClassifyView.as_view()),
    path("score", ScoreView.as_view()),
    path("v1/score", ScoreView.as_view()),
    path("rerank", RerankView.as_view()),
    path("v1/rerank", RerankView.as_view()),
    path("v2/rerank", RerankV2View.as_view()),
    path("v1/files", FilesView.as_view()),
    path("v1/files/<str:file_id>", FileView.as_view()),
    path("v1/files/<str:file_id>/content", FileContentView.as_view()),
    path("v1/batches", BatchesView.as_view()),
    path("v1/batches/<str:batch_id>", BatchView.as_view()),
    path("v1/batches/<str:batch_id>/cancel", BatchCancelView.as_view()),
    path("v1/responses", ResponsesView.as_view()),
    path("v1/responses/input_tokens", InputTokensView.as_view()),
    path("v1/responses/render", ResponseRenderView.as_view()),
    path("v1/responses/compact", CompactView.as_view()),
    path("v1/responses/<str:response_id>", ResponseView.as_view()),
    path("v1/responses/<str:response_id>/cancel", ResponseCancelView.as_view()),
    path("v1/responses/<str:response_id>/input_items", ResponseInputItemsView.as_view()),
    path("v1/conversations", ConversationsView.as_view()),
    path("v1/conversations/<str:conversation_id>", ConversationView.as_view()),
    path("v1/conversations/<str:conversation_id>/items", ConversationItemsView.as_view()),
    path(
        "v1/conversations/<str:conversation_id>/items/<str:item_id>",
        ConversationItemView.as_view(),
    ),
    path("v1/uploads", UploadsView.as_view()),
    path("v1/uploads/<str:upload_id>/parts", UploadPartsView.as_view()),
    path("v1/uploads/<str:upload_id>/complete", UploadCompleteView.as_view()),
    path("v1/uploads/<str:upload_id>/cancel", UploadCancelView.as_view()),
    path("v1/messages", MessagesView.as_view()),
    path("v1/messages/render", MessagesRenderView.as_view()),
    path("v1/messages/count_tokens", CountTokensView.as_view()),
    path("v1/messages/batches", MessageBatchesView.as_view()),
    path("v1/messages/batches/<str:batch_id>", MessageBatchView.as_view()),
    path("v1/messages/batches/<str:batch_id>/cancel", MessageBatchCancelView.as_view()),
    path("v1/messages/batches/<str:batch_id>/results", MessageBatchResultsView.as_view()),
    path("tokenize", TokenizeView.as_view()),
    path("detokenize", DetokenizeView.as_view()),
    path("reset_prefix_cache", ResetPrefixCacheView.as_view()),
    path("reset_mm_cache", ResetMediaCacheView.as_view()),
    path("reset_encoder_cache", ResetEncoderCacheView.as_view()),
    path("pause", PauseView.as_view()),
    path("resume", ResumeView.as_view()),
    path("is_paused", IsPausedView.as_view()),
    path("abort_requests", AbortRequestsView.as_view()),
    path("start_profile", StartProfileView.as_view()),
    path("stop_profile", StopProfileView.as_view()),
    path("collective_rpc", CollectiveRpcView.as_view()),
    path("tokenizer_info", TokenizerInfoView.as_view()),
    path("sleep", SleepView.as_view()),
    path("scale_elastic_ep", ScaleView.as_view()),
    path("is_scaling_elastic_ep", IsScalingView.as_view()),
    path("get_world_size", WorldSizeView.as_view()),
    path("wake_up", WakeUpView.as_view()),
    path("is_sleeping", IsSleepingView.as_view()),
    path("load", LoadView.as_view()),
    path("server_info", ServerInfoView.as_view()),
    path("health", HealthView.as_view()),
    path("ping", PingView.as_view()),
    path("live", PingView.as_view()),
    path("ready", ReadyView.as_view()),
    path("version", VersionView.as_view()),
    path("openapi.json", OpenApiView.as_view()),
    path("metrics", MetricsView.as_view()),
    re_path(r"^v1/messages/.*$", UnknownMessagesView.as_view()),
    re_path(r"^v1(?:/.*)?$", UnknownPathView.as_view()),
]
