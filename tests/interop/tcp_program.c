/*
 * A TCP program. It sends numbers that count up, and at the same time checks that it receives the
 * same numbers.
 *
 *     tcp_program connect|listen HOST PORT BYTES
 *
 * It stops sending long before it has received the last byte, as HTTP/1.0 clients do. With 0 bytes
 * it sends "hello", then never receives and never ends.
 */
#include <arpa/inet.h>
#include <netdb.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int sock;
static size_t size;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static unsigned char byte_at(size_t at)
{
	uint32_t number = htonl(at / 4);

	return ((unsigned char *)&number)[at % 4];
}

static void *send_all(void *unused)
{
	unsigned char part[30000];
	size_t at = 0;

	while (at < size) {
		size_t length = size - at < sizeof(part) ? size - at : sizeof(part);
		ssize_t sent;

		for (size_t i = 0; i < length; i++)
			part[i] = byte_at(at + i);
		sent = send(sock, part, length, 0);
		if (sent < 0)
			fail("send");
		at += sent;
	}
	if (shutdown(sock, SHUT_WR))
		fail("shutdown");
	return unused;
}

static void receive_all(void)
{
	unsigned char part[20000];
	size_t at = 0;
	ssize_t got;

	while ((got = recv(sock, part, sizeof(part), 0)) > 0) {
		for (ssize_t i = 0; i < got; i++) {
			if (part[i] != byte_at(at + i)) {
				printf("wrong at %zu\n", at + i);
				exit(1);
			}
		}
		at += got;
	}
	if (got < 0)
		fail("recv");
	printf("%zu bytes\n", at);
}

int main(int argc, char **argv)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
	pthread_t sender;

	if (argc != 5 || getaddrinfo(argv[2], argv[3], &hints, &found))
		return 2;
	size = strtoul(argv[4], NULL, 10);
	sock = socket(found->ai_family, SOCK_STREAM, 0);
	if (!strcmp(argv[1], "listen")) {
		int listener = sock;

		if (bind(listener, found->ai_addr, found->ai_addrlen) || listen(listener, 1))
			fail("listen");
		puts("listening");
		fflush(stdout);
		sock = accept(listener, NULL, NULL);
		if (sock < 0)
			fail("accept");
	} else if (connect(sock, found->ai_addr, found->ai_addrlen)) {
		fail("connect");
	}
	if (!size) {
		send(sock, "hello", 5, 0);
		pause();
	}
	if (pthread_create(&sender, NULL, send_all, NULL))
		return 2;
	receive_all();
	pthread_join(sender, NULL);
	close(sock);
	return 0;
}
