"""llama-index: a completion, a chat, a stream; then a small RAG: embeddings, a ranking and a chat."""

import os

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.jinaai_rerank import JinaRerank

llm = OpenAILike(
    model=os.environ["TANDEM_MODEL"],
    api_base=os.environ["TANDEM_URL"] + "/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=32,
    max_retries=0,
)
assert llm.complete("What is 17 + 25?").text
question = [ChatMessage(role="user", content="What is 17 + 25?")]
assert llm.chat(question).message.content
assert [each.delta for each in llm.stream_chat(question)]

embeddings = OpenAILikeEmbedding(
    model_name=os.environ["TANDEM_EMBEDDER"],
    api_base=os.environ["TANDEM_URL"] + "/v1",
    api_key="none",
    max_retries=0,
)
texts = ["A KV cache keeps keys and values of earlier tokens.", "A robin is a small bird.", "Rates rise in spring."]
index = VectorStoreIndex.from_documents([Document(text=text) for text in texts], embed_model=embeddings)
(best,) = index.as_retriever(similarity_top_k=1).retrieve("What does a KV cache keep?")
assert "keys and values" in best.text, best
ranking = JinaRerank(
    api_key="none", model=os.environ["TANDEM_RERANKER"], top_n=2, base_url=os.environ["TANDEM_URL"] + "/v1"
)
engine = index.as_query_engine(llm=llm, similarity_top_k=3, node_postprocessors=[ranking])
answer = engine.query("What does a KV cache keep?")
assert str(answer) and len(answer.source_nodes) == 2, answer
