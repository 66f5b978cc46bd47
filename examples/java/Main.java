// Streams a text, resuming it after lost connections, and cancels another stream: java Main [PROMPT]
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.time.Duration;
import java.time.Instant;
import java.util.UUID;
import java.util.function.Consumer;
import pagewire.v1.FinishReason;
import pagewire.v1.GenerateRequest;
import pagewire.v1.GenerateResponse;
import pagewire.v1.InferenceServiceGrpc;
import pagewire.v1.ResumeState;
import pagewire.v1.ResumedOutput;
import pagewire.v1.SamplingParams;

class Main {
    static final Duration PATIENCE = Duration.ofMinutes(1);

    static boolean canResume(Status status, boolean again) {
        switch (status.getCode()) {
            case UNAVAILABLE: case CANCELLED:
                return true;
            case INTERNAL:
                return String.valueOf(status.getDescription()).contains("RST_STREAM");
            case ALREADY_EXISTS: case RESOURCE_EXHAUSTED:
                return again;
            default:
                return false;
        }
    }

    /** Calls `use` with each message, and resumes the stream after a loss. */
    static void generate(InferenceServiceGrpc.InferenceServiceBlockingStub client, GenerateRequest request,
            Consumer<GenerateResponse> use) throws InterruptedException {
        var state = ResumeState.newBuilder();
        var output = ResumedOutput.newBuilder();
        var heard = Instant.now();
        while (true) {
            try {
                var messages = client.generate(request);
                while (messages.hasNext()) {
                    var message = messages.next();
                    heard = Instant.now();
                    if (message.hasSeed()) state.setSeed(message.getSeed()).setModelFingerprint(message.getModelFingerprint());
                    output.addAllTokenIds(message.getTokenIdsList());
                    use.accept(message);
                    if (message.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED) return;
                }
                return;
            } catch (StatusRuntimeException error) {
                boolean isLate = Instant.now().isAfter(heard.plus(PATIENCE));
                if (Context.current().isCancelled() || isLate || !canResume(error.getStatus(), request.hasResume()))
                    throw error;
                Thread.sleep(300);
                state.clearOutputs();
                if (output.getTokenIdsCount() > 0) state.addOutputs(output);
                request = request.toBuilder().setResume(state).build();
                System.err.println("trying again");
            }
        }
    }

    static GenerateRequest newRequest(String[] words) {
        return GenerateRequest.newBuilder()
            .setRequestId(UUID.randomUUID().toString())
            .setText(words.length > 0 ? words[0] : "Once upon a time")
            .setSampling(SamplingParams.newBuilder().setMaxTokens(256).setTemperature(1))
            .build();
    }

    public static void main(String[] words) throws Exception {
        var authority = new File(System.getenv("PAGEWIRE_CLIENT_TLS"), "ca.crt");
        ManagedChannel channel = NettyChannelBuilder.forTarget(System.getenv("PAGEWIRE_TARGET"))
            .sslContext(GrpcSslContexts.forClient().trustManager(authority).build()).build();
        var key = new Metadata();
        var name = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
        key.put(name, "Bearer " + System.getenv("PAGEWIRE_CLIENT_API_KEY"));
        var client = InferenceServiceGrpc.newBlockingStub(channel)
            .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(key));

        long[] seed = {0};
        generate(client, newRequest(words), message -> {
            if (message.hasSeed()) seed[0] = message.getSeed();
            System.out.print(message.getText());
            System.out.flush();
        });
        System.out.println("\nseed " + Long.toUnsignedString(seed[0]));

        try (var context = Context.current().withCancellation()) {
            context.run(() -> {
                try {
                    generate(client, newRequest(words), message -> context.cancel(null));
                } catch (StatusRuntimeException error) {
                    if (error.getStatus().getCode() == Status.Code.CANCELLED) System.out.println("cancelled");
                } catch (InterruptedException error) {
                    Thread.currentThread().interrupt();
                }
            });
        }
        channel.shutdownNow();
    }
}
