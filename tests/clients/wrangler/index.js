// An ordinary Worker: nothing in it knows of Tandem.
export default {
  async fetch(request, env) {
    const { model, options, ...inputs } = await request.json();
    try {
      if (!model) return Response.json((await env.AI.models({ search: "demo" })).map((each) => each.name));
      const answer = await env.AI.run(model, inputs, options);
      if (inputs.stream) return new Response(answer, { headers: { "content-type": "text/event-stream" } });
      return Response.json({ ...answer, requestId: env.AI.lastRequestId });
    } catch (error) {
      return Response.json({ name: error.name, message: error.message }, { status: 500 });
    }
  },
};
