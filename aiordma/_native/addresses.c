/* The addresses of this machine's interfaces; non-blocking file descriptors. */
#define _GNU_SOURCE
#include "helpers.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <sys/socket.h>

int aiordma_set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -1;
	return fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

/*
 * Write the addresses of all interfaces that are up into `text`. Each line is
 * "interface address\n"; a link-local IPv6 address contains its scope. Returns the length of the
 * text, or -1 with errno (ENOSPC: `size` is too small).
 */
int aiordma_ifaddrs(char *text, size_t size)
{
	struct ifaddrs *list, *entry;
	char host[NI_MAXHOST];
	size_t used = 0;
	int length;

	if (getifaddrs(&list))
		return -1;
	for (entry = list; entry; entry = entry->ifa_next) {
		if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP))
			continue;
		if (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6)
			continue;
		if (getnameinfo(entry->ifa_addr,
				entry->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) :
									sizeof(struct sockaddr_in6),
				host, sizeof(host), NULL, 0, NI_NUMERICHOST))
			continue;
		length = snprintf(text + used, size - used, "%s %s\n", entry->ifa_name, host);
		if (length < 0 || (size_t)length >= size - used) {
			freeifaddrs(list);
			errno = ENOSPC;
			return -1;
		}
		used += length;
	}
	freeifaddrs(list);
	return (int)used;
}
