// Streams a text, resuming it after lost connections, and cancels another stream: main [PROMPT]
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	pb "pagewire/v1"
)

const patience = time.Minute

func canResume(err error, again bool) bool {
	switch found := status.Convert(err); found.Code() {
	case codes.Unavailable, codes.Canceled:
		return true
	case codes.Internal:
		return strings.Contains(found.Message(), "RST_STREAM")
	case codes.AlreadyExists, codes.ResourceExhausted:
		return again
	}
	return false
}

// generate calls use with each message, and resumes the stream after a loss.
func generate(ctx context.Context, client pb.InferenceServiceClient, request *pb.GenerateRequest, use func(*pb.GenerateResponse)) error {
	var first *pb.GenerateResponse
	var tokens []uint32
	heard := time.Now()
	for {
		stream, err := client.Generate(ctx, request)
		for err == nil {
			var message *pb.GenerateResponse
			if message, err = stream.Recv(); err != nil {
				break
			}
			heard = time.Now()
			if first == nil {
				first = message
			}
			tokens = append(tokens, message.TokenIds...)
			use(message)
			if message.FinishReason != pb.FinishReason_FINISH_REASON_UNSPECIFIED {
				return nil
			}
		}
		if ctx.Err() != nil || !canResume(err, request.Resume != nil) || time.Since(heard) > patience {
			return err
		}
		time.Sleep(300 * time.Millisecond)
		request.Resume = &pb.ResumeState{}
		if first != nil {
			request.Resume.Seed, request.Resume.ModelFingerprint = first.Seed, first.ModelFingerprint
			request.Resume.Outputs = []*pb.ResumedOutput{{TokenIds: tokens}}
		}
		fmt.Fprintln(os.Stderr, "trying again")
	}
}

func newRequest() *pb.GenerateRequest {
	id := make([]byte, 16)
	rand.Read(id)
	prompt, maxTokens, temperature := "Once upon a time", uint32(256), float32(1)
	if len(os.Args) > 1 {
		prompt = os.Args[1]
	}
	return &pb.GenerateRequest{
		RequestId: fmt.Sprintf("%x", id),
		Prompt:    &pb.GenerateRequest_Text{Text: prompt},
		Sampling:  &pb.SamplingParams{MaxTokens: &maxTokens, Temperature: &temperature},
	}
}

func main() {
	tls, err := credentials.NewClientTLSFromFile(os.Getenv("PAGEWIRE_CLIENT_TLS")+"/ca.crt", "")
	if err != nil {
		log.Fatal(err)
	}
	channel, err := grpc.Dial(os.Getenv("PAGEWIRE_TARGET"), grpc.WithTransportCredentials(tls))
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()
	client := pb.NewInferenceServiceClient(channel)
	ctx := metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer "+os.Getenv("PAGEWIRE_CLIENT_API_KEY"))

	var seed uint64
	err = generate(ctx, client, newRequest(), func(message *pb.GenerateResponse) {
		if message.Seed != nil {
			seed = *message.Seed
		}
		fmt.Print(message.Text)
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\nseed %d\n", seed)

	ctx, cancel := context.WithCancel(ctx)
	err = generate(ctx, client, newRequest(), func(*pb.GenerateResponse) { cancel() })
	if status.Code(err) == codes.Canceled {
		fmt.Println("cancelled")
	}
}
